"""Lines of a step log, as a start that read given instances writes them, and what an audit says of them."""

from typing import Any

import numpy as np

from trainer.data.coverage import Coverage
from trainer.data.hashes import ids_hash
from trainer.data.order import open_order
from trainer.recipe import Recipe
from trainer.rundir.records import StepLine


def line(step: int, read: np.ndarray | str, **changes: Any) -> StepLine:
    """The line of a step that read these ids (or whose ids have this hash)."""
    body: dict[str, Any] = {
        "step": step, "loss": 5.0 - step / 1000, "grad_norm": 1.0, "lr": 1e-3, "skipped": False,
        "ids": read if isinstance(read, str) else ids_hash(read), "data": f"{step:016x}", "seconds": 0.1,
    }  # fmt: skip
    return StepLine(**(body | changes))


def lines(recipe: Recipe, first: int, last: int, **changes: Any) -> list[StepLine]:
    """A right log of steps first..last."""
    order = open_order(recipe)
    return [line(s, order.batch_ids(s - 1), **changes) for s in range(first, last + 1)]


def texts(coverage: Coverage) -> str:
    """What an audit complains of."""
    return "\n".join(problem.text for problem in coverage.problems)
