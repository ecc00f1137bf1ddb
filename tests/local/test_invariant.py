"""`reduction: invariant` with real processes: one run, bit for bit, whatever it trains on and however often that changes."""

import json
from collections.abc import Callable
from typing import Any

from tests.support.gang import Run, small_recipe

STEPS = 200
LAYOUT = {"commit_every": 20, "evaluate_every": 100}

# Until which step it trains on (devices, processes, micro-batch). Every state is compared at the commits that both make: a
# layout that gave other bits would show at the next one, wherever in the run it has its turn. Processes exchange through
# TCP, a second or two of computing a step: those, fewer.
LAYOUTS = [
    (10, "cpu-8", 2, 2),
    (100, "cpu-2", 1, 4),
    (110, "cpu-4", 4, 2),
    (STEPS, "cpu-8", 1, 1),
]


def invariant_recipe() -> Any:
    recipe = small_recipe(reduction="invariant")
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"mask_documents": True})})


def held_out(run: Run) -> dict[str, float]:
    return {path.stem: json.loads(path.read_text())["loss"] for path in run.folder.glob("eval/*/*.json")}


def test_the_same_bits_on_any_devices(new_run: Callable[..., Run]) -> None:
    """State digests (parameters, moments, skip window), losses, norms and held-out losses of 200 steps."""
    # One device, one instance after the other.
    reference = new_run("reference", recipe=invariant_recipe(), optimised=True)
    reference.train("cpu-1", STEPS, micro_batch=1, seconds=400, **LAYOUT)
    run = new_run(recipe=invariant_recipe(), optimised=True)
    for target, device, processes, micro_batch in LAYOUTS:
        run.train(device, target, processes=processes, micro_batch=micro_batch, seconds=400, **LAYOUT)
    assert run.numbers() == reference.numbers()
    assert len(run.numbers()) == STEPS
    digests, expected = ({record.ref.step: record.digest for record in of.lineage()} for of in (run, reference))
    assert list(expected) == list(range(STEPS, 0, -20))
    assert {step: digests[step] for step in expected} == expected
    assert {"params/head", "mu/wq", "nu/embedding", "window/losses", "window/grad_norms"} <= set(digests[STEPS])
    assert held_out(run) == held_out(reference)
    assert set(held_out(run)) == {"100", "200"}


def test_the_fast_reduction_does_not_do_that(new_run: Callable[..., Run]) -> None:
    """So the test above can fail: a few steps on other devices are enough."""
    runs = [new_run(device, optimised=True) for device in ("cpu-1", "cpu-2")]
    for run, device in zip(runs, ("cpu-1", "cpu-2"), strict=True):
        run.train(device, 8, commit_every=8)
    one, two = (run.lineage()[0].digest for run in runs)
    assert one != two
