"""Held-out loss of one state: every held-out instance once, in file order, the same on any device count.

The devices give one summed cross entropy per instance; the sum over instances is exact on the host, so results of one
state differ between meshes only by how a single instance's own sum is rounded.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.data.hashes import ids_hash
from trainer.data.loader import held_out_batches
from trainer.data.mix import Mix
from trainer.plan import Plan
from trainer.recipe import Recipe
from trainer.rundir.records import CommitRef
from trainer.rundir.store import AlreadyExists, NotFound, Store


@dataclass(frozen=True)
class HeldOut:
    """Result of one evaluation. `loss` is the mean cross entropy per target, in nats."""

    loss: float
    instances: int
    targets: int
    ids: str
    seconds: float


def due(recipe: Recipe, evaluate_every: int | None, step: int) -> bool:
    """Whether the state after `step` steps is to be evaluated."""
    return bool(recipe.data.held_out) and evaluate_every is not None and step > 0 and step % evaluate_every == 0


def evaluate(
    params: Any,
    recipe: Recipe,
    plan: Plan,
    mesh: Any,
    mix: Mix,
    step_fn: Callable[..., Any],
    rank: int,
    beat: Callable[[], None] = lambda: None,
) -> HeldOut:
    """Mean loss of `params` on `mix` (the held-out part). All processes call it; all get the result.

    `step_fn` is make_eval_step's; `beat` is called after each batch.
    """
    from trainer.sharding import put_batch

    began = time.monotonic()
    rows = plan.data_parallel * plan.micro_batch
    sums: list[float] = []
    targets = 0
    for batch in held_out_batches(mix, plan, rank):
        found = step_fn(params, put_batch(batch, mesh))
        real = min(rows, len(mix) - len(sums))
        sums.extend(np.asarray(found["ce_sum"], np.float64).reshape(-1)[:real].tolist())
        targets += int(np.asarray(found["count"]).reshape(-1)[:real].sum())
        beat()
    ids = ids_hash(np.arange(len(mix), dtype=np.uint64))
    return HeldOut(math.fsum(sums) / max(targets, 1), len(sums), targets, ids, round(time.monotonic() - began, 4))


def key(ref: CommitRef) -> str:
    """Where the result of a commit lies: it belongs to the commit, whichever start computed it."""
    return f"eval/{ref.attempt}.{ref.start}/{ref.step}.json"


def has_result(store: Store, ref: CommitRef) -> bool:
    try:
        store.get(key(ref))
    except NotFound:
        return False
    return True


def write_result(store: Store, ref: CommitRef, result: HeldOut, by: str) -> None:
    """Store the result, once; a second one for the same commit is the same numbers and is dropped."""
    body = {
        "version": 1,
        "step": ref.step,
        "commit": ref.model_dump(mode="json"),
        "loss": result.loss,
        "instances": result.instances,
        "targets": result.targets,
        "ids": result.ids,
        "seconds": result.seconds,
        "by": by,
        "time": time.time(),
    }
    try:
        store.create(key(ref), json.dumps(body, sort_keys=True).encode())
    except AlreadyExists:
        pass
