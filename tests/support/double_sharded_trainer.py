"""The trainer with its loader broken on purpose: sharded twice, as MaxText 0.2.5 shards OLMo's data (`python -m trainer …`).

There each of H hosts slices the batch itself and tells Grain to slice too. A host then reads each H-th element of its own
share, and epochs pass H times too fast. Here one process reads what H of them would have read together.
"""

import sys
import time
from typing import Any, Self

import trainer.training
from trainer.cli import main
from trainer.data.explain import double_sharded
from trainer.data.hashes import split_ids
from trainer.data.mix import Mix
from trainer.data.order import BatchOrder
from trainer.plan import Plan
from trainer.recipe import Recipe

HOSTS = 4


class DoubleSharded:
    """In place of trainer.data.loader.Loader; nothing compares what it reads with the order."""

    def __init__(self, mix: Mix, order: BatchOrder, recipe: Recipe, plan: Plan, process: int, first: int = 0) -> None:
        assert plan.processes == 1
        self._mix, self._order, self._plan, self._next = mix, order, plan, first

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, dict[str, Any]]:
        layout = (1, HOSTS, self._order.batch // HOSTS)
        ids = double_sharded(self._order, self._next, layout).reshape(self._plan.accumulation, -1)
        tokens = self._mix.instances(ids.reshape(-1)).reshape(*ids.shape, -1)
        self._next += 1
        return self._next - 1, {"tokens": tokens, "ids": split_ids(ids)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    trainer.training.Loader = DoubleSharded  # type: ignore[assignment, misc]
    main(time.monotonic(), sys.argv[1:])
