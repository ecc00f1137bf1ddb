"""The planner against compiled programs: what is known wins, what is estimated keeps a margin, refusals say what would do."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import get_args
from unittest.mock import Mock

import pytest

from orchestrator.plan_table import REACHED, mesh, plan_table
from orchestrator.planning import Rung, make_plan
from trainer.errors import ConfigurationError
from trainer.hardware import device_type
from trainer.plan import Plan, rows_per_device
from trainer.preflight import choice, document, table
from trainer.preflight.choice import candidates, choose
from trainer.preflight.dividing import WAITED, factors, step_seconds
from trainer.preflight.document import best
from trainer.preflight.ladder import LADDER
from trainer.preflight.memory import GIB, MemoryModel, base, fit, point, shape_of, unit
from trainer.preflight.policies import POLICIES
from trainer.preflight.table import Row, cost_key
from trainer.recipe import Recipe, load, override

SEVEN_B: Recipe = load("olmo3_7b_stage1")
KIND = device_type("tpu7x-4x4x4")
SHAPE = shape_of(SEVEN_B)
NONE, *_, FULL = sorted(POLICIES, key=lambda p: p.recomputed)


def row(micro_batch: int, remat: str, peak: float, device: str = KIND.name, slices: int = 1, floor: float = 2.0) -> Row:
    kind = device_type(device)
    assert kind.hbm_gib_per_device is not None
    devices = kind.devices * slices
    return Row(
        recipe=SEVEN_B.name,
        key=cost_key(SEVEN_B),
        device_type=device,
        slices=slices,
        devices=devices,
        micro_batch=micro_batch,
        accumulation=SEVEN_B.global_batch // devices // micro_batch,
        remat=remat,
        verdict="fits" if peak <= kind.hbm_gib_per_device else "out of memory",
        peak_gib=peak,
        limit_gib=kind.hbm_gib_per_device,
        compile_seconds=1.0,
        versions={},
        shape=SHAPE.__dict__,
        step_seconds_floor=floor if peak <= kind.hbm_gib_per_device else None,
    )


def test_the_planner_knows_every_policy_that_a_plan_can_name() -> None:
    assert {p.name for p in POLICIES} == set(get_args(Plan.model_fields["remat"].annotation))


def test_recomputing_comes_after_more_passes_and_after_sharing_where_that_costs_less() -> None:
    found = list(candidates(SEVEN_B, KIND, 1))
    tried = [(c.plan.micro_batch, c.policy.recomputed) for c in found if c.plan.sequence == 1]
    assert tried[:3] == [(4, NONE.recomputed), (2, NONE.recomputed), (1, NONE.recomputed)]
    assert [share for _, share in tried] == sorted(share for _, share in tried)
    for stage, device in (("olmo3_7b_stage1", "tpu7x-4x4x4"), ("olmo3_7b_stage3", "v5p-4x4x4")):
        recipe, kind = load(stage), device_type(device)
        times = [
            step_seconds(recipe, kind, 1, c.plan.sequence, c.policy.recomputed, c.plan.accumulation)
            for c in candidates(recipe, kind, 1)
        ]
        assert times == sorted(times)
    # All of a forward pass again is a third more work, keys and values from three others a twenty-fifth more time.
    ways = [(c.plan.sequence, c.policy.name) for c in candidates(load("olmo3_7b_stage3"), device_type("v5p-4x4x4"), 1)]
    assert ways.index((4, "none")) < ways.index((1, "mlp")) < ways.index((1, "full"))


def test_the_links_are_reckoned_as_the_compiled_programs_wait_for_them() -> None:
    """A table made by another compiler that hides less changes what the planner assumes."""
    waited = [
        row.waiting_seconds / row.communication_seconds
        for row in table.rows()
        if row.tensor == 1 and row.waiting_seconds is not None and row.communication_seconds
    ]
    assert len(waited) > 10
    assert median(waited) == pytest.approx(WAITED, abs=0.05)


def test_a_pass_sends_what_the_compiled_passes_send() -> None:
    """Weights and their gradients; nothing else is sent where sequences are whole."""
    rows = [r for r in table.of_recipe(SEVEN_B) if r.fits and (r.sequence, r.tensor, r.slices) == (1, 1, 1)]
    assert len(rows) > 5
    for found in rows:
        assert found.communication_seconds is not None
        one, two = (step_seconds(SEVEN_B, device_type(found.device_type), 1, 1, passes=n) for n in (1, 2))
        assert (two - one) / WAITED == pytest.approx(found.communication_seconds / found.accumulation, rel=0.1)


def test_what_was_reckoned_is_not_far_from_what_was_compiled() -> None:
    """Of slices that were compiled in two ways that fit, waiting included: which is faster, and by how much.

    But for whole sequences of 65,536 tokens that are recomputed: adding up the parts of dq costs them a quarter more.
    """
    compared = 0
    for recipe in map(load, ("olmo3_7b_stage1", "olmo3_7b_stage3")):
        rows = [r for r in table.of_recipe(recipe) if r.fits and r.tensor == 1 and r.remat != FULL.name]
        for one, other in combinations(rows, 2):
            if (one.device_type, one.slices) == (other.device_type, other.slices):
                reckoned = [_reckoned(recipe, r) for r in (one, other)]
                assert reckoned[0] / reckoned[1] == pytest.approx(one.seconds / other.seconds, rel=0.05)
                compared += 1
    assert compared >= 4


def _reckoned(recipe: Recipe, row: Row) -> float:
    recomputed = next(p.recomputed for p in POLICIES if p.name == row.remat)
    return step_seconds(recipe, device_type(row.device_type), row.slices, row.sequence, recomputed, row.accumulation)


def test_the_page_shows_the_plans_that_are_taken() -> None:
    for entry in LADDER:
        taken = choose(load(entry.recipe), device_type(entry.device_type), entry.slices)
        assert entry.tensor > 1 or best(entry) == taken.row


def test_another_compiler_s_count_is_not_kept_beside_a_new_one() -> None:
    """The fastest is taken, and two compilers do not count alike."""
    old = row(1, NONE.name, 60.0, floor=1.0)
    new = replace(row(2, NONE.name, 80.0), versions={"libtpu": "2"})
    for one in (new, replace(new, micro_batch=1, accumulation=4)):
        assert table.added([old], one) == [one]
    for beside in (replace(old, versions=new.versions), replace(old, verdict="out of memory"), replace(old, tensor=2)):
        assert table.added([beside], new) == [beside, new]
    refused = replace(new, verdict="out of memory")
    assert table.added([old], refused) == [old, refused]


def test_the_state_is_divided_over_the_devices_that_hold_it_once() -> None:
    """A slice's, where slices are replicas; all, where the order of sums is invariant. In predictions and in what is learnt."""
    kind = device_type("tpu7x-2x2x1")
    for reduction, share, axes in (("fast", 8, "slice=4 fsdp=8"), ("invariant", 32, "fsdp=32")):
        recipe = SEVEN_B.model_copy(update={"reduction": reduction})
        for candidate in candidates(recipe, kind, 4, MemoryModel(0.0, {p.name: 0.0 for p in POLICIES}, 0.0)):
            assert candidate.predicted_gib == base(shape_of(recipe), share, candidate.plan.accumulation)
            if candidate.plan.sequence == 1:
                assert mesh(candidate.plan, recipe) == axes
    known = row(1, NONE.name, 70.0, "tpu7x-4x4x4", slices=2)
    assert known.sharing_state == 128
    assert replace(known, shape={**known.shape, "invariant": True}).sharing_state == 256


def test_a_sequence_stays_within_a_slice() -> None:
    recipe = SEVEN_B.model_copy(update={"global_batch": 8})
    found = factors(recipe, device_type("v5p-2x2x1"), 6)
    assert found and all(4 % n == 0 for n in found)


def test_the_best_that_is_known_to_fit_is_taken() -> None:
    known = [row(4, NONE.name, 150.0), row(2, NONE.name, 80.0), row(1, NONE.name, 45.0), row(4, FULL.name, 60.0)]
    choice = choose(SEVEN_B, KIND, known=known)
    assert (choice.plan.micro_batch, choice.plan.remat, choice.peak_gib, choice.source) == (
        2,
        NONE.name,
        80.0,
        "compiled",
    )
    # What ran out of memory is never taken, whatever the model thinks of it.
    choice = choose(SEVEN_B, KIND, known=[row(2, NONE.name, 95.0), row(1, NONE.name, 50.0)])
    assert (choice.plan.micro_batch, choice.source) == (1, "compiled")


def test_of_several_that_fit_the_fastest_is_taken_with_its_waiting() -> None:
    known = [replace(row(m, NONE.name, 60.0, floor=f), waiting_seconds=w) for m, f, w in ((4, 2.0, 0.2), (2, 2.1, 0.0))]
    assert choose(SEVEN_B, KIND, known=known).plan.micro_batch == 2
    # A program whose cycles were never counted is taken where there is no other.
    known = [replace(known[0], step_seconds_floor=None), known[1]]
    assert choose(SEVEN_B, KIND, known=known).plan.micro_batch == 2
    assert choose(SEVEN_B, KIND, known=known[:1]).plan.micro_batch == 4


def test_the_model_learns_from_what_did_not_fit_and_carries_over_to_other_slices() -> None:
    """165 GiB at two instances, 88.6 at one: 76 an instance, so that no larger slice takes two either."""
    known = [row(2, NONE.name, 164.9), row(1, NONE.name, 88.6), row(2, FULL.name, 40.0), row(4, FULL.name, 60.0)]
    choice = choose(SEVEN_B, device_type("tpu7x-4x4x8"), known=known)
    assert (choice.plan.micro_batch, choice.plan.remat, choice.source) == (1, NONE.name, "estimated")
    assert choice.peak_gib == pytest.approx(88.2, abs=3)


def test_an_estimate_keeps_away_from_the_limit_by_how_wrong_the_model_was() -> None:
    known = [row(1, NONE.name, 91.0), row(2, FULL.name, 40.0), row(4, FULL.name, 60.0)]
    larger = device_type("tpu7x-4x4x8")
    assert choose(SEVEN_B, larger, known=known).plan.sequence == 1
    # The same, but two compilations contradict each other by some GiB: one instance at 91 is now too near to 94.7.
    torn = [*known, row(4, FULL.name, 66.0, "v5p-4x4x8")]
    assert choose(SEVEN_B, larger, known=torn).plan.sequence == 2


def test_the_fit_finds_what_made_the_points() -> None:
    truth = {NONE.name: 1.7, FULL.name: 1.3}
    points = [
        point(
            SHAPE,
            devices,
            micro,
            2,
            policy,
            base(SHAPE, devices, 2) + 6.0 + truth[policy.name] * unit(SHAPE, micro, policy),
        )
        for policy in (NONE, FULL)
        for devices, micro in ((64, 1), (128, 2), (512, 4))
    ]
    model = fit(points)
    assert model.fixed_gib == pytest.approx(6.0, abs=0.05)
    assert model.scales == pytest.approx(truth, abs=0.01)
    assert model.error_gib < 0.05


def test_state_and_gradients_are_divided_over_all_devices() -> None:
    assert base(SHAPE, 128, 1) * GIB == pytest.approx(16 * 7.2986e9 / 128, rel=1e-3)
    assert base(SHAPE, 128, 2) * GIB == pytest.approx(20 * 7.2986e9 / 128, rel=1e-3)


def test_a_policy_never_compiled_has_a_wider_margin() -> None:
    model = MemoryModel(0.0, {NONE.name: 1.0}, 0.5)
    assert model.margin(80.0, FULL) > model.margin(80.0, NONE) > 0.5


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("tpu7x-4x4x12", ("64 of 576 rows", "384 devices do not divide", "89% of the work counts", "tpu7x-4x4x8 (256")),
        ("v5p-8x8x12", ("64 of 576 rows", "89% of the work counts", "v5p-8x8x8 (512")),
    ],
)
def test_what_does_not_divide_is_filled_up_and_says_what_it_costs(device: str, words: tuple[str, ...]) -> None:
    plan = choose(SEVEN_B, device_type(device)).plan
    (made,) = plan_table([Rung(0, plan, device.split("-")[0], 0.0)], SEVEN_B, 1000)
    assert (made.padding, made.efficiency) == (plan.rows - 512, 512 / plan.rows)
    for word in words:
        assert word in str(made.warning)


def test_what_fits_nowhere_says_what_is_missing() -> None:
    """Four million tokens, of which no two devices can have whole tiles."""
    long = override(SEVEN_B, {"sequence_length": 128 * 32769})
    with pytest.raises(ConfigurationError, match="no slice of tpu7x would do: a shorter sequence_length"):
        choose(long, KIND)


def test_a_sequence_that_fits_on_no_device_is_shared() -> None:
    plan = choose(override(SEVEN_B, {"sequence_length": 2**20}), KIND).plan
    assert plan.sequence > 1
    assert plan.data_parallel * plan.micro_batch * plan.accumulation == SEVEN_B.global_batch


def test_what_devices_share_is_in_the_table(tmp_path: Path) -> None:
    """As much memory as for a sequence of half the length; no row of another division is taken for it."""
    half = replace(row(1, NONE.name, 50.0), sequence=2, versions={"jax": "0"})
    assert half.tokens.sequence_length == SEVEN_B.sequence_length // 2
    plan = next(c.plan for c in candidates(SEVEN_B, KIND, 1) if c.plan.sequence == 2)
    assert not replace(half, sequence=1, micro_batch=plan.micro_batch, accumulation=plan.accumulation).is_for(plan)
    assert replace(half, micro_batch=plan.micro_batch, accumulation=plan.accumulation).is_for(plan)
    table.write(tmp_path / "plans.json", [half])
    assert table.read(tmp_path / "plans.json") == (half,)


def test_recipes_that_differ_in_rates_and_files_cost_the_same() -> None:
    assert cost_key(override(SEVEN_B, {"optimizer.weight_decay": 0.2, "name": "x", "init_seed": 7})) == cost_key(
        SEVEN_B
    )
    assert cost_key(override(SEVEN_B, {"model.n_layers": 28})) != cost_key(SEVEN_B)
    assert cost_key(override(SEVEN_B, {"data.mask_documents": True})) != cost_key(SEVEN_B)


def test_the_committed_table_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    table.write(tmp_path / "plans.json", table.rows())
    assert table.read(tmp_path / "plans.json") == table.rows()
    assert (tmp_path / "plans.json").read_text() == table.FILE.read_text() if table.FILE.exists() else not table.rows()


def test_every_row_that_the_planner_takes_fits() -> None:
    for r in table.rows():
        assert r.fits == (r.peak_gib is not None and r.peak_gib <= r.limit_gib), r
        batch, groups = load(r.recipe).global_batch, r.devices // (r.sequence * r.tensor)
        assert r.micro_batch * r.accumulation == rows_per_device(batch, groups)


def test_the_page_of_plans_is_the_generated_one() -> None:
    page = Path(__file__).parents[2] / "docs" / "plans.md"
    assert page.read_text() == document.markdown(), "python -m trainer.preflight.fill --document"


def test_days_and_chip_hours_follow_from_the_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (row(2, NONE.name, 80.0, floor=2.0), row(1, NONE.name, 45.0, "tpu7x-4x8x8", floor=0.5))
    monkeypatch.setattr(table, "rows", lambda: known)
    monkeypatch.setattr(table, "memory_model", lambda: table.fitted(known))
    monkeypatch.setattr(choice, "_committed_choice", choice._committed_choice.__wrapped__)  # other rows are remembered
    names = ("tpu7x-4x8x8", "tpu7x-4x4x4", "v5p-4x4x8")
    rungs = [Rung(i, make_plan(SEVEN_B, name), name.split("-")[0], 0.0) for i, name in enumerate(names)]
    large, small, other = plan_table(rungs, SEVEN_B, 1000)
    assert small.step_seconds_estimate == pytest.approx(2.0 / REACHED)
    waits = {0: replace(known[0], waiting_seconds=1.0)}
    assert plan_table([rungs[0]], SEVEN_B, 1000, waits)[0].step_seconds_estimate == pytest.approx(3.0)
    assert small.tokens_per_second == pytest.approx(512 * 8192 / (2.0 / REACHED))
    assert small.days == pytest.approx(1000 * 2.0 / REACHED / 86400)
    assert small.chip_hours == pytest.approx(1000 * 2.0 / REACHED / 3600 * 64)
    assert (large.against_best, small.against_best) == (1.0, pytest.approx(0.25))
    assert (large.source, other.source, other.days) == ("compiled", "estimated", None)
    compiled = replace(known[0], device_type="v5p-4x4x8", peak_gib=70.0)
    assert plan_table(rungs, SEVEN_B, 1000, {2: compiled})[2].source == "compiled"


def test_what_an_operator_asks_at_every_look_is_reckoned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of runs that differ in what no plan depends on."""
    choice._committed_choice.cache_clear()
    reckoned = Mock(wraps=choice.candidates)
    monkeypatch.setattr(choice, "candidates", reckoned)
    files = {"data": SEVEN_B.data.model_copy(update={"files": SEVEN_B.data.files * 2})}
    recipes = [SEVEN_B, SEVEN_B.model_copy(), SEVEN_B.model_copy(update={"name": "another", **files})]
    plans = [make_plan(recipe, "tpu7x-4x4x8") for recipe in recipes]
    assert reckoned.call_count == 1
    assert plans == [plans[0]] * 3


DIFFERENCES = {
    "global_batch": 1024,
    "sequence_length": 4096,
    "compute_dtype": "float32",
    "reduction": "invariant",
}


def test_what_is_remembered_is_what_would_be_reckoned() -> None:
    """For recipes that differ in one thing each, asked for one after the other."""
    recipes = [
        SEVEN_B,
        *(SEVEN_B.model_copy(update={name: value}) for name, value in DIFFERENCES.items()),
        SEVEN_B.model_copy(update={"data": SEVEN_B.data.model_copy(update={"mask_documents": True})}),
        SEVEN_B.model_copy(update={"model": SEVEN_B.model.model_copy(update={"n_layers": 8})}),
    ]
    for kind in map(device_type, ("tpu7x-4x4x8", "v5p-4x4x8")):
        chosen = [choose(recipe, kind) for recipe in recipes]
        assert chosen == [choose(recipe, kind, 1, table.rows()) for recipe in recipes]
        assert len({(c.plan, c.peak_gib, c.source) for c in chosen}) == len(recipes), "one of them changes nothing"
