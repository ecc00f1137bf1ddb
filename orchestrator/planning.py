"""recipe × device type × slices → plan, exactly; and the ladder of plans that a run accepts. Pure.

The global batch never changes: fewer devices mean more accumulation, and a device type on which the batch cannot be
split exactly is refused with the ones that can.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from orchestrator.api import TrainingRun
from trainer.errors import ConfigurationError
from trainer.hardware import DeviceType, device_type, device_types
from trainer.plan import Plan, split_batch
from trainer.recipe import Model, Recipe
from trainer.settings import Settings

# One forward pass on a CPU device: large enough for good matrix shapes, small enough for its cache.
CPU_TOKENS = 4096
# Of the accelerator's memory; the rest is for gathered weights, the head's logits and what the compiler adds.
MEMORY_SHARE = 0.9
GIB = 2**30
STATE_BYTES = 16  # per parameter: float32 weight, gradient, and the two moments
MAX_SUGGESTIONS = 4


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


@dataclass(frozen=True)
class PlanRow:
    """One line of `untildone plan`."""

    rung: int
    device_type: str
    slices: int
    devices: int
    processes: int
    micro_batch: int
    accumulation: int
    per_device_batch: int
    remat: str
    wait_in_queue: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
    """The plan of `recipe` on `slices` slices of device type `name`.

    Accumulation first: the micro-batch is the largest divisor of the per-device batch that memory allows. `field` is
    put before the field's name in errors. Raises ConfigurationError for an unknown device type, a batch that cannot be
    split exactly, and a model that does not fit even with everything recomputed.
    """
    try:
        kind = device_type(name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{field}{error}") from None
    devices = kind.devices * slices
    if recipe.global_batch % devices:
        raise ConfigurationError(f"{field}deviceType {name!r}: {_inexact(recipe, kind, slices)}")
    cap, remat = micro_batch_cap(recipe, kind, slices)
    if cap == 0:
        raise ConfigurationError(
            f"{field}deviceType {name!r}: one instance of {recipe.sequence_length} tokens does not fit into "
            f"{kind.hbm_gib_per_device} GiB per device over {devices} devices, even with all activations recomputed; "
            "use a larger slice or more slices"
        )
    micro_batch, accumulation = split_batch(recipe.global_batch, devices, cap)
    return Plan(
        device_type=kind.name,
        slices=slices,
        processes=kind.processes * slices,
        devices=devices,
        global_batch=recipe.global_batch,
        data_parallel=devices,
        micro_batch=micro_batch,
        accumulation=accumulation,
        remat=remat,
    )


def micro_batch_cap(recipe: Recipe, kind: DeviceType, slices: int) -> tuple[int, Literal["none", "full"]]:
    """Instances per device and forward pass that memory allows, and whether activations must be recomputed for it.

    0: not even one fits. An estimate, checked against compiled programs of the 7B model on tpu7x-4x4x4 (2 × 8192
    tokens, nothing recomputed: 60.6 GiB compiled, 65 GiB here). A smaller micro-batch with nothing recomputed beats
    recomputing: it costs one more gather of the weights, not a third of the FLOPs.
    """
    if kind.hbm_gib_per_device is None:
        return max(1, CPU_TOKENS // recipe.sequence_length), "none"
    model = recipe.model
    room = kind.hbm_gib_per_device * GIB * MEMORY_SHARE - parameters(model) * STATE_BYTES / (kind.devices * slices)
    width = 2 if recipe.compute_dtype == "bfloat16" else 4
    # Saved for the backward pass, per token: 8 vectors of the model's width and 3 of the MLP's in each layer.
    layer = (8 * model.d_model + 3 * model.mlp_hidden) * width * recipe.sequence_length
    kept = int(room // (layer * model.n_layers))
    if kept >= 1:
        return kept, "none"
    # Recomputed: only the input of each layer stays, and one layer at a time is whole.
    inputs = model.d_model * width * recipe.sequence_length * model.n_layers
    return max(0, int(room // (inputs + layer))), "full"


def parameters(model: Model) -> int:
    """Parameters of the model, embedding and head included."""
    attention = model.d_model * model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads)
    norms = 2 * model.d_model + model.head_dim * (model.n_heads + model.n_kv_heads)
    layer = attention + 3 * model.d_model * model.mlp_hidden + norms
    return 2 * model.padded_vocab_size * model.d_model + model.n_layers * layer + model.d_model


def settings(run: TrainingRun) -> Settings:
    """What an attempt of `run` is told besides recipe and plan."""
    spec = run.spec
    local = not spec.run_directory.startswith("gs://")
    return Settings(
        target_step=spec.target_step,
        data_root=spec.data.root,
        commit_every=spec.checkpoint.every_steps,
        keep=spec.keep(),
        evaluate_every=spec.evaluation.every_steps,
        held_out_same_text=spec.evaluation.same_text,
        grace_seconds=spec.grace_period,
        hang_step_seconds=spec.hang.step,
        hang_start_seconds=spec.hang.start,
        heartbeat_timeout_seconds=round(spec.hang.heartbeat),
        progress_seconds=spec.progress_every,
        log_seconds=spec.log_every,
        compile_cache=spec.compile_cache or (f"{spec.run_directory.rstrip('/')}/cache/compile" if local else None),
        init_from=spec.init_from.settings() if spec.init_from else None,
    )


def plan_rows(rungs: tuple[Rung, ...]) -> tuple[PlanRow, ...]:
    """The table that `untildone plan` shows."""
    return tuple(
        PlanRow(
            rung=rung.index,
            device_type=rung.plan.device_type,
            slices=rung.plan.slices,
            devices=rung.plan.devices,
            processes=rung.plan.processes,
            micro_batch=rung.plan.micro_batch,
            accumulation=rung.plan.accumulation,
            per_device_batch=rung.plan.per_device_batch,
            remat=rung.plan.remat,
            wait_in_queue=rung.wait_in_queue,
        )
        for rung in rungs
    )


def _inexact(recipe: Recipe, kind: DeviceType, slices: int) -> str:
    """Why the batch cannot be split, in numbers, and what of the same family would do."""
    batch, devices = recipe.global_batch, kind.devices * slices
    of = f"{slices} × {kind.name} has {devices} devices" if slices > 1 else f"{kind.name} has {devices} devices"
    sum_ = (
        f"global_batch {batch} ÷ {devices} = {batch // devices} remainder {batch % devices}"
        if devices <= batch
        else f"global_batch {batch} is smaller than {devices}"
    )
    fitting = sorted(_exact(batch, kind), key=lambda n: (abs(n[0] - devices), n[0], n[2]))[:MAX_SUGGESTIONS]
    what = [f"{name} ({count} devices)" if n == 1 else f"{n} × {name} ({count} devices)" for count, name, n in fitting]
    hint = f"of {kind.family}, these fit: {', '.join(what)}" if what else f"no slice of {kind.family} fits"
    return f"{of}, and {sum_}: no plan makes that batch exact; {hint}"


def _exact(batch: int, kind: DeviceType) -> Iterator[tuple[int, str, int]]:
    """(devices, name, slices) of the same family that divide the batch; several slices of `kind` among them."""
    for other in device_types(kind.family):
        if batch % other.devices == 0:
            yield other.devices, other.name, 1
    for n in range(2, batch // kind.devices + 1):
        if batch % (kind.devices * n) == 0:
            yield kind.devices * n, kind.name, n
