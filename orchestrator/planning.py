"""recipe × device type × slices → plan, exactly; and the ladder of plans that a run accepts. Pure.

The global batch never changes: fewer devices mean more accumulation, more devices than instances share the sequences,
and where the devices do not divide it, rows without an instance fill it up.
"""

from dataclasses import dataclass

from orchestrator.api import TrainingRun
from trainer.errors import ConfigurationError
from trainer.hardware import device_type
from trainer.plan import Plan, split_batch
from trainer.preflight.choice import choose, refuse_inexact
from trainer.preflight.dividing import factors
from trainer.preflight.plans import plan_of
from trainer.recipe import Recipe
from trainer.settings import Settings, compile_cache_of

# One forward pass on a CPU device: large enough for good matrix shapes, small enough for its cache.
CPU_TOKENS = 4096


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder. `devices` of `family` are what it needs of the quota."""

    index: int
    plan: Plan
    family: str
    wait_in_queue: float  # seconds

    @property
    def devices(self) -> int:
        return self.plan.devices

    def __str__(self) -> str:
        return shown(self.plan)


def shown(plan: Plan) -> str:
    """A plan in a few characters: "cpu-8", "2 × tpu7x-4x4x4"."""
    return plan.device_type if plan.slices == 1 else f"{plan.slices} × {plan.device_type}"


def ladder(run: TrainingRun, recipe: Recipe) -> tuple[Rung, ...]:
    """The rungs of `run`, best first. Raises ConfigurationError naming spec.ladder[i] and what would fit."""
    rungs: list[Rung] = []
    for index, wanted in enumerate(run.spec.ladder):
        field = f"spec.ladder[{index}]."
        plan = make_plan(recipe, wanted.device_type, wanted.slices, field)
        twin = next((rung for rung in rungs if rung.plan == plan), None)
        if twin is not None:
            raise ConfigurationError(
                f"{field}deviceType {wanted.device_type!r}: the same slice as spec.ladder[{twin.index}]; remove one"
            )
        family = device_type(wanted.device_type).family
        rungs.append(Rung(index, plan, family, wanted.wait_in_queue))
    return tuple(rungs)


def make_plan(recipe: Recipe, name: str, slices: int = 1, field: str = "") -> Plan:
    """The plan of `recipe` on `slices` slices of device type `name`: the best that fits (trainer.preflight.choice).

    `field` is put before the field's name in errors. Raises ConfigurationError for an unknown device type, a batch that
    must be split exactly and cannot, and a model that does not fit even with everything recomputed.
    """
    try:
        kind = device_type(name)
        if kind.hbm_gib_per_device is not None:
            return choose(recipe, kind, slices).plan
        refuse_inexact(recipe, kind, slices)
    except ConfigurationError as error:
        raise ConfigurationError(f"{field}{error}") from None
    sequence = factors(recipe, kind, slices)[0]
    largest = max(1, CPU_TOKENS * sequence // recipe.sequence_length)
    micro_batch, _ = split_batch(recipe.global_batch, kind.devices * slices // sequence, largest)
    return plan_of(recipe, kind, slices, micro_batch, "none", sequence)


def settings(run: TrainingRun) -> Settings:
    """What an attempt of `run` is told besides recipe and plan."""
    spec = run.spec
    return Settings(
        target_step=spec.target_step,
        data_root=spec.data.root,
        commit_every=spec.checkpoint.every_steps,
        keep=spec.keep(),
        evaluate_every=spec.evaluation.every_steps,
        evaluation=spec.evaluation.settings(),
        held_out_same_text=spec.evaluation.same_text,
        grace_seconds=spec.grace_period,
        hang_step_seconds=spec.hang.step,
        hang_start_seconds=spec.hang.start,
        heartbeat_timeout_seconds=round(spec.hang.heartbeat),
        progress_seconds=spec.progress_every,
        log_seconds=spec.log_every,
        compile_cache=spec.compile_cache or compile_cache_of(spec.run_directory),
        init_from=spec.init_from.settings() if spec.init_from else None,
    )
