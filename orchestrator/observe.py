"""Reads everything that is known about one run, once: the cluster first, then its run directory.

How long a fact has held is not read but remembered, on our own clock (memory.py, marks.py).
"""

import secrets
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import Protocol

from orchestrator.api import TrainingRun
from orchestrator.clusters.base import Cluster, ClusterUnavailable, ClusterView
from orchestrator.marks import marks_of
from orchestrator.memory import Memory
from orchestrator.observation import CLUSTER, RUN_DIRECTORY, Observation, StartFacts, ending_key, request_name
from orchestrator.planning import ladder
from trainer.errors import ConfigurationError, StorageUnavailable, TruthUnknown
from trainer.recipe import Recipe
from trainer.rundir.alarms import Alarm
from trainer.rundir.records import (
    AttemptSpec,
    Ending,
    ExitRecord,
    Head,
    InitRecord,
    Progress,
    RecipeRecord,
    Request,
    RequestDone,
    StartRecord,
    Submitted,
)
from trainer.rundir.rundir import differences


class RunReader(Protocol):
    """What an observation reads of a run directory (trainer.rundir.rundir.RunDirectory, by way of reading.py).

    Missing objects are None; every call may raise StorageUnavailable, TruthUnknown or ConfigurationError.
    """

    def head(self, at_least: int = 0) -> tuple[Head, int] | None: ...
    def read_recipe(self) -> RecipeRecord | None: ...
    def read_init(self) -> InitRecord | None: ...
    def read_spec(self, attempt: int) -> AttemptSpec | None: ...
    def read_submitted(self, attempt: int) -> Submitted | None: ...
    def read_start(self, attempt: int, start: int) -> StartRecord | None: ...
    def read_progress(self, attempt: int, start: int) -> Progress | None: ...
    def read_exit(self, attempt: int, start: int) -> ExitRecord | None: ...
    def read_pod_exit(self, attempt: int, pod_uid: str) -> ExitRecord | None: ...
    def endings(self, attempt: int) -> tuple[Ending, ...]: ...
    def read_request(self, identifier: str) -> Request | None: ...
    def read_answer(self, identifier: str) -> RequestDone | None: ...
    def read_alarm(self, name: str) -> Alarm | None: ...


def image_of(run: TrainingRun) -> str:
    """What an attempt submitted now would run: the image, or this version of the trainer on the local cluster."""
    if run.spec.image is not None:
        return run.spec.image
    return _installed_version()


@cache
def _installed_version() -> str:
    """Looked up once: it searches the whole path, 1 ms, and would be a sixth of every look."""
    try:
        return f"untildone {metadata.version('untildone')}"
    except metadata.PackageNotFoundError:
        return "untildone (not installed)"


def read_observation(
    run: TrainingRun, recipe: Recipe, cluster: Cluster, rundir: RunReader, memory: Memory, *, take_over: bool = False
) -> Observation:
    """Look at everything once. Never raises for a source that does not answer; that source is in `unknown`.

    The cluster is read before HEAD: HEAD only grows, so a gang of a later attempt than the HEAD read afterwards cannot
    be explained by bad timing.
    """
    unknown: dict[str, str] = {}
    view: ClusterView | None = None
    try:
        view = cluster.observe(run.name)
    except ClusterUnavailable as error:
        unknown[CLUSTER] = str(error) or "no answer"
    observation = Observation(
        recipe=recipe,
        rungs=ladder(run, recipe),
        image=image_of(run),
        program=cluster.program(run),
        nonce=secrets.token_hex(8),
        take_over=take_over,
        view=view,
        highest_attempt=memory.highest_attempt,
    )
    try:
        observation = _with_run_directory(observation, rundir, memory, stopping=run.spec.suspend)
    except (StorageUnavailable, TruthUnknown) as error:
        unknown[RUN_DIRECTORY] = str(error) or "no answer"
    except ConfigurationError as error:
        observation = replace(observation, refusals=(str(error),))
    memory.highest_attempt = max(memory.highest_attempt, observation.attempt)
    observation = replace(observation, unknown=unknown)
    return replace(observation, marks=memory.note(marks_of(observation), unknown))


def _with_run_directory(o: Observation, rundir: RunReader, memory: Memory, stopping: bool) -> Observation:
    """`o` with what the run directory says. Any answer that is missing raises; half a picture is none.

    `stopping`: the user asks for a stop, so the current start may have been asked for a commit.
    """
    head, generation = rundir.head(o.highest_attempt) or (None, 0)
    attempt = head.attempt if head else 0
    recorded = rundir.read_recipe()
    o = replace(
        o,
        recorded=recorded,
        recipe_differences=_differences(recorded.recipe, o.recipe, memory) if recorded else (),
        init=rundir.read_init(),
        head=head,
        generation=generation,
        spec=rundir.read_spec(attempt) if head else None,
        submitted=rundir.read_submitted(attempt) if head else None,
        next_spec=rundir.read_spec(attempt + 1),
        later_attempts=rundir.read_submitted(attempt + 1) is not None or rundir.read_spec(attempt + 2) is not None,
        endings=tuple(e for a in range(1, attempt + 1) for e in rundir.endings(a)),
    )
    if head is None:
        return o
    if head.start and (stopping or o.next_spec is not None):
        o = _with_request(o, rundir, head)
    starts = tuple(_start_facts(rundir, head, start) for start in _starts_of_interest(o, head))
    exits = {uid: record for a, uid in _pods_of_interest(o) if (record := rundir.read_pod_exit(a, uid)) is not None}
    alarms = tuple(alarm for name in _alarms(starts, head) if (alarm := rundir.read_alarm(name)) is not None)
    return replace(o, starts=starts, pod_exits=exits, alarms=alarms)


def _alarms(starts: tuple[StartFacts, ...], head: Head) -> tuple[str, ...]:
    """Names of the open alarms; the current start repeats those of its predecessors once it has begun."""
    reports = [start.progress for start in starts if start.start == head.start and start.progress is not None]
    return reports[-1].alarms if reports else ()


def _with_request(o: Observation, rundir: RunReader, head: Head) -> Observation:
    """The newest request for a commit of the current start."""
    number = 1
    while rundir.read_answer(request_name(head, number)) is not None:
        number += 1
    if rundir.read_request(request_name(head, number)) is not None:
        return replace(o, asked=True, request=number)
    answered = number > 1
    return replace(o, asked=answered, answered=answered, request=max(1, number - 1))


def _differences(recorded: Recipe, wanted: Recipe, memory: Memory) -> tuple[str, ...]:
    """Compared once as long as both are the same objects: with a thousand files that takes 18 ms."""
    last = memory.compared
    if last is not None and last[0] is recorded and last[1] is wanted:
        return last[2]
    old, new = (recipe.model_dump(mode="json", exclude={"name"}) for recipe in (recorded, wanted))
    found = tuple(differences(old, new))
    memory.compared = (recorded, wanted, found)
    return found


def _starts_of_interest(o: Observation, head: Head) -> list[int]:
    """The current start, those that the ledger lacks, and the ones after those: they say what was restored."""
    entered = {ending.start for ending in o.endings if ending.attempt == head.attempt}
    missing = {start for start in range(1, head.start + 1) if start not in entered}
    return sorted(start for start in missing | {s + 1 for s in missing} | {head.start} if 1 <= start <= head.start)


def _pods_of_interest(o: Observation) -> list[tuple[int, str]]:
    """(attempt, pod uid) of ended admissions that the ledger does not have yet."""
    keys = {ending.key for ending in o.endings}
    gangs = [*o.view.gangs, *o.view.deleted] if o.view else []
    return sorted(
        (gang.attempt, uid)
        for gang in gangs
        for admission in gang.admissions
        if admission.ended is not None and ending_key(gang, admission) not in keys
        for uid in admission.pod_uids
    )


def _start_facts(rundir: RunReader, head: Head, start: int) -> StartFacts:
    record = rundir.read_start(head.attempt, start)
    current = start == head.start
    pod_uid = head.pod_uid if current else record.pod_uid if record else None
    restart_attempt = head.restart_attempt if current else record.restart_attempt if record else -1
    return StartFacts(
        start=start,
        pod_uid=pod_uid,
        restart_attempt=restart_attempt,
        record=record,
        progress=rundir.read_progress(head.attempt, start),
        exit=rundir.read_exit(head.attempt, start),
    )
