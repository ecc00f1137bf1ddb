"""A run without an orchestrator: one process is submitter and gang at once.

The run directory is the same as any other's, so `verify` and the orchestrator can read it, and a later attempt may come
from either.
"""

import os
import uuid
from typing import Any

from trainer import recipe as recipes
from trainer.distributed import free_port
from trainer.environment import GangEnvironment
from trainer.errors import ConfigurationError
from trainer.evaluation_settings import expand, parse_sets
from trainer.freezing import freeze
from trainer.hardware import device_type
from trainer.plan import Plan, split_batch
from trainer.preflight.choice import refuse_inexact
from trainer.preflight.dividing import factors
from trainer.recipe import Recipe
from trainer.rundir.records import AttemptSpec
from trainer.rundir.rundir import RunDirectory
from trainer.settings import InitFrom, Settings, compile_cache_of

MICRO_BATCH = 64  # rows per device and forward pass: small enough for a laptop, large enough to keep its cores busy


def plan_here(recipe: Recipe, device: str) -> Plan:
    """The plan of one process on this machine. Raises ConfigurationError for device types that need several."""
    kind = device_type(device)
    if kind.processes > 1:
        raise ConfigurationError(
            f"--device {device}: it has {kind.processes} processes, and this command starts one; "
            "use cpu-1, cpu-2 or cpu-4, or `untildone run` for a gang"
        )
    refuse_inexact(recipe, kind, 1)
    sequence = factors(recipe, kind, 1)[0]
    rows = kind.devices // sequence
    micro_batch, accumulation = split_batch(recipe.global_batch, rows, MICRO_BATCH)
    return Plan(
        device_type=kind.name,
        processes=1,
        devices=kind.devices,
        global_batch=recipe.global_batch,
        data_parallel=rows,
        sequence=sequence,
        micro_batch=micro_batch,
        accumulation=accumulation,
    )


def prepare(
    recipe: str,
    *,
    run_directory: str | None,
    data_root: str | None,
    device: str,
    target: int | None,
    commit_every: int | None,
    evaluate_every: int | None,
    sets: tuple[str, ...],
    same_text: bool,
    tasks: tuple[str, ...],
    tasks_every: int | None,
    compile_cache: str | None,
    init_from: str | None,
    overrides: tuple[str, ...],
    **gang: Any,
) -> GangEnvironment | str:
    """Submit the next attempt of the run and return the environment of its only process.

    A run that is done already gets no attempt: returns what to say about it.
    """
    for option, value in (("--run-directory", run_directory), ("--data-root", data_root), ("--target", target)):
        if value is None:
            raise ConfigurationError(f"--recipe {recipe}: {option} is needed as well")
    unused = [f"--{name.replace('_', '-')}" for name, value in gang.items() if value is not None]
    if unused:
        raise ConfigurationError(f"{', '.join(unused)}: only for a process of a gang; leave out, or leave out --recipe")
    assert run_directory is not None
    assert data_root is not None
    assert target is not None
    frozen = freeze(recipes.load(recipe, recipes.parse_overrides(overrides)), data_root)
    plan = plan_here(frozen, device)
    given = {"commit_every": commit_every, "evaluate_every": evaluate_every}
    settings = Settings.parse(
        {
            "target_step": target,
            "compile_cache": compile_cache or compile_cache_of(run_directory),
            "data_root": os.path.abspath(data_root) if "://" not in data_root else data_root,
            "init_from": _source(init_from) if init_from else None,
            "held_out_same_text": same_text,
            "evaluation": {
                "sets": [one.model_dump() for one in parse_sets(sets)],
                "tasks": tasks,
                "tasks_every": tasks_every,
            },
            **{name: value for name, value in given.items() if value is not None},
        },
        "options",
    )
    rundir = RunDirectory.open(run_directory, create=True)
    found = rundir.head()
    head = found[0] if found else None
    if head is not None and head.commit is not None and head.commit.step > target:
        raise ConfigurationError(
            f"--target {target} is lower than what is committed (step {head.commit.step}) in {rundir.uri}; raise it"
        )
    if rundir.read_recipe() is None:  # fixed for good by the next line: a mistake in the sources must show before
        from trainer.beginning import resolve
        from trainer.data.held_out import check_corpus
        from trainer.evaluate import check_tasks

        resolve(settings.init_from)
        if settings.init_from is not None and settings.init_from.hf is not None:
            from trainer.weights.sources import open_hugging_face

            open_hugging_face(settings.init_from.hf, frozen)
        check_tasks(frozen, settings)
        check_corpus(frozen, data_root, expand(settings.evaluation.sets))
    rundir.create_recipe(frozen)
    if head is not None and head.commit is not None and head.commit.step == target:
        return f"done already: step {target} is committed in {rundir.uri}; raise --target to train on"
    attempt = (head.attempt if head else 0) + 1
    spec = rundir.adopt_spec(
        AttemptSpec(
            attempt=attempt,
            nonce=uuid.uuid4().hex,
            gang=f"standalone-a{attempt}",
            plan=plan,
            settings=settings,
            image="standalone",
            submitted_by=f"process {os.getpid()}",
        )
    )
    rundir.swap_to_attempt(attempt)
    return GangEnvironment(
        run_directory=run_directory,
        attempt=attempt,
        nonce=spec.nonce,
        pod_uid=uuid.uuid4().hex,
        restart_attempt=0,
        process_id=0,
        process_count=1,
        coordinator=f"127.0.0.1:{free_port()}",
    )


def _source(init_from: str) -> InitFrom:
    """What --init-from means: hf:FOLDER, or a run's URI[@STEP]."""
    if not init_from.startswith("hf:"):
        return InitFrom(run=init_from)
    folder = init_from.removeprefix("hf:")
    return InitFrom(hf=folder if "://" in folder else os.path.abspath(folder))
