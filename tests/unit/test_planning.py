"""Plans: exact on every device type they are made for, refused with what would fit otherwise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning import ladder, make_plan, settings
from tests.support.world import run_of, tiny_recipe
from trainer.errors import ConfigurationError
from trainer.hardware import device_type, device_types
from trainer.preflight.dividing import divides
from trainer.recipe import Recipe, load
from trainer.settings import InitFrom

TINY = tiny_recipe()
SEVEN_B: Recipe = load("olmo3_7b_stage1")


def refused(recipe: Recipe, name: str, slices: int = 1) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make_plan(recipe, name, slices, "spec.ladder[0].")
    return str(caught.value)


def test_fewer_devices_mean_more_accumulation_and_the_same_micro_batch() -> None:
    eight, two = make_plan(TINY, "cpu-8"), make_plan(TINY, "cpu-2")
    assert (eight.processes, eight.devices, eight.micro_batch, eight.accumulation) == (2, 8, 64, 1)
    assert (two.processes, two.devices, two.micro_batch, two.accumulation) == (1, 2, 64, 4)


@given(
    st.sampled_from([t.name for family in ("cpu", "tpu7x", "v5p", "v6e") for t in device_types(family)]),
    st.integers(1, 4),
)
def test_a_plan_is_exact_where_it_can_be_and_filled_up_elsewhere(name: str, slices: int) -> None:
    kind = device_type(name)
    plan = make_plan(TINY, name, slices)
    assert plan.rows - plan.padding == TINY.global_batch
    assert plan.devices == plan.data_parallel * plan.sequence == kind.devices * slices
    assert (plan.padding == 0) == divides(TINY, kind, slices)
    if not divides(TINY, kind, slices):
        with pytest.raises(ConfigurationError, match="these fit"):
            make_plan(TINY.model_copy(update={"reduction": "invariant"}), name, slices)
    assert plan.processes == device_type(name).processes * slices


def test_per_device_batches_of_the_seven_b_model() -> None:
    for name, per_device in {
        "tpu7x-4x4x4": 4,
        "tpu7x-4x8x8": 1,
        "v5p-4x4x4": 8,
        "v5p-4x4x8": 4,
        "v7x-4x4x4": 4,
    }.items():
        assert make_plan(SEVEN_B, name).per_device_batch == per_device


def test_more_devices_than_instances_share_the_sequences() -> None:
    plan = make_plan(SEVEN_B, "tpu7x-8x8x8")
    assert (plan.data_parallel, plan.sequence, plan.per_device_batch) == (512, 2, 1)
    four = TINY.model_copy(update={"global_batch": 4})
    plan = make_plan(four, "cpu-8")
    assert (plan.data_parallel, plan.sequence, plan.micro_batch, plan.accumulation) == (4, 2, 1, 1)
    assert make_plan(four, "cpu-4").sequence == 1
    stage_3: Recipe = load("olmo3_7b_stage3")
    plan = make_plan(stage_3, "tpu7x-4x4x8")
    assert plan.data_parallel * plan.sequence == 256
    assert plan.sequence >= 4


def test_a_model_that_does_not_fit_at_all_is_refused() -> None:
    message = refused(SEVEN_B, "v5e-1x1")
    assert "spec.ladder[0].deviceType 'v5e-1x1'" in message
    assert "these should do: v5e-" in message


def test_a_batch_that_must_be_exact_and_cannot_names_arithmetic_and_alternatives() -> None:
    invariant = SEVEN_B.model_copy(update={"reduction": "invariant"})
    message = refused(invariant, "v5p-4x4x12")
    for word in ("spec.ladder[0].deviceType", "192 devices", "512 ÷ 192", "remainder 128", "v5p-4x4x8 (128 devices)"):
        assert word in message, message
    assert "smaller than 1024: reduction invariant keeps" in refused(invariant, "tpu7x-8x8x8")
    several = refused(TINY.model_copy(update={"reduction": "invariant"}), "cpu-4", 3)
    assert "3 × cpu-4 has 12 devices" in several
    assert "cpu-8 (8 devices)" in several


def test_an_unknown_device_type_names_the_field_and_near_ones() -> None:
    message = refused(TINY, "v5p-4x4x5")
    assert message.startswith("spec.ladder[0].deviceType 'v5p-4x4x5'")
    assert "v5p-4x4x4" in message
    with pytest.raises(ConfigurationError, match=r"spec\.ladder\[1\]\.deviceType 'gpu-8'"):
        ladder(run_of(ladder=[{"deviceType": "cpu-8"}, {"deviceType": "gpu-8"}]), TINY)


def test_two_names_of_one_slice_are_one_rung_too_many() -> None:
    with pytest.raises(ConfigurationError, match=r"the same slice as spec\.ladder\[0\]"):
        ladder(run_of(ladder=[{"deviceType": "v5p-4x4x4"}, {"deviceType": "v5p-128"}]), TINY)


def test_settings_carry_everything_the_trainer_is_told() -> None:
    made = settings(run_of(hang={"step": "2m", "start": "5m", "heartbeat": "15s"}, initFrom={"run": "/runs/parent@8"}))
    assert (made.hang_step_seconds, made.hang_start_seconds, made.heartbeat_timeout_seconds) == (120, 300, 15)
    assert made.compile_cache == "/runs/demo/cache/compile"
    assert made.init_from is not None
    assert made.init_from.run == "/runs/parent@8"
    assert settings(run_of(runDirectory="gs://bucket/run")).compile_cache == "gs://bucket/run/cache/compile"
    made = settings(run_of(initFrom={"hf": "/weights"}))
    assert made.init_from == InitFrom(hf="/weights", optimizer_state=False)
