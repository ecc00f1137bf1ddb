"""The status of a run on the model of the world, kept as an operator keeps it in a TrainingRun."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.api import TrainingRun
from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.decisions import Decision, Done, Freeze, GiveUp, Refused, Wait
from orchestrator.lifecycle import decide
from orchestrator.memory import Memory
from orchestrator.observation import Observation
from orchestrator.observe import read_observation
from orchestrator.status import RunStatus, status_of
from tests.support.world import World, run_of
from trainer.errors import Fenced, StorageUnavailable

Check = Callable[[TrainingRun, Observation, Decision, RunStatus | None, RunStatus, float], None]


def with_generation(run: TrainingRun, generation: int) -> TrainingRun:
    return run.model_copy(update={"metadata": run.metadata.model_copy(update={"generation": generation})})


class Writer:
    """An operator: looks, acts, and keeps the status as it was written last."""

    def __init__(self, world: World, check: Check | None = None) -> None:
        self.world = world
        self.check = check
        self.spec: dict[str, Any] = {}
        self.generation = 1
        world.run = with_generation(world.run, 1)
        self.memory = Memory(lambda: world.now)
        self.status: RunStatus | None = None

    def change(self, **spec: Any) -> None:
        self.spec |= spec
        self.generation += 1
        self.world.run = with_generation(run_of(**self.spec), self.generation)

    def step(self) -> RunStatus:
        world = self.world
        o = read_observation(world.run, world.recipe, world, world.rundir, self.memory)
        decision = decide(world.run, o, world.now)
        new = status_of(world.run, o, decision, self.status, world.now)
        if self.check is not None:
            self.check(world.run, o, decision, self.status, new, world.now)
        self.status = RunStatus.of({"status": json.loads(json.dumps(new.to_object()))})
        assert self.status == new, "what is written is what is read back"
        if not isinstance(decision, (Freeze, Refused, Done, GiveUp, Wait)):
            try:
                world.carry_out(decision)
            except (ClusterUnavailable, StorageUnavailable, Fenced):
                pass
        return new


def until(writer: Writer, word: str, seconds: int = 120) -> RunStatus:
    """Step until STATUS is `word`."""
    for _ in range(seconds):
        status = writer.step()
        if status.condition("Succeeded").reason == word:
            return status
        writer.world.tick()
    pytest.fail(f"never {word}: {writer.status}")
