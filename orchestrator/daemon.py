"""Keeps one run going until it is done: observe, decide, carry out one thing, look again. Nothing else.

Level-based and crash-only: what is known comes from the cluster and the run directory at each look, so that this
process can be killed between any two calls and the next one continues. Nobody else has to be kept out: two of them on
one run collide at creations and at HEAD, and owner.json saves them from working against each other. The training
itself runs under the cluster and does not notice.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import structlog

from orchestrator.api import TrainingRun
from orchestrator.carry_out import carry_out
from orchestrator.clusters.base import Cluster, ClusterUnavailable, SubmitConflict
from orchestrator.decisions import (
    Decision,
    DeleteGang,
    Done,
    Freeze,
    GiveUp,
    OwnedByOther,
    Refused,
    StopForPlanChange,
    SubmitGang,
    Wait,
    WriteSpec,
)
from orchestrator.lifecycle import decide
from orchestrator.memory import Memory
from orchestrator.observation import CLUSTER, RUN_DIRECTORY, Observation
from orchestrator.observe import read_observation
from orchestrator.owners import READ_SECONDS, Ownership, local_owner
from orchestrator.preparing import ConfigMaps, open_run, prepare
from orchestrator.reading import RunReading
from trainer.errors import ConfigurationError, Fenced, StorageUnavailable, TrainerError
from trainer.recipe import Recipe
from trainer.rundir.rundir import RunDirectory

POLL_SECONDS = 0.25
SLOWEST_POLL_SECONDS = 2.0
REFUSED_SECONDS = 30.0  # what a store or a cluster refused is not tried again before


@dataclass(frozen=True)
class Interrupted:
    """This process was told to stop. The training goes on without it."""

    message: str


@dataclass(frozen=True)
class Outcome:
    """How `resume_until_done` ended; `end` says why."""

    end: Done | GiveUp | Refused | Interrupted

    @property
    def word(self) -> Literal["Completed", "BudgetExhausted", "Refused", "Interrupted"]:
        """The STATUS word, or Interrupted when the run goes on."""
        if isinstance(self.end, Done):
            return "Completed"
        if isinstance(self.end, GiveUp):
            return "BudgetExhausted"
        return "Refused" if isinstance(self.end, Refused) else "Interrupted"

    @property
    def message(self) -> str:
        return self.end.message


@dataclass(frozen=True)
class Look:
    """One look at the run, and what was decided on it."""

    observation: Observation
    decision: Decision
    now: float

    @property
    def mark(self) -> object:
        """Equal marks mean that nothing a person would notice has changed."""
        o, start = self.observation, self.observation.current_start
        progress = start.progress if start else None
        gang = o.gang
        decision = self.decision
        shown: object = (type(decision).__name__, getattr(decision, "message", None))
        if isinstance(decision, WriteSpec):  # its nonce is fresh in each look
            shown = ("WriteSpec", decision.spec.attempt)
        elif not isinstance(decision, (Wait, Freeze)):
            shown = decision
        return (
            shown,
            o.attempt,
            start.start if start else 0,
            o.committed_step,
            (progress.phase, progress.step) if progress else None,
            (gang.phase, len(gang.admissions)) if gang else None,
            len(o.endings),
            o.alarms,
        )


class Caretaker:
    """Looks after one run; `step()` is one look and at most one act."""

    def __init__(
        self,
        run: TrainingRun,
        recipe: Recipe,
        cluster: Cluster,
        rundir: RunDirectory,
        *,
        clock: Callable[[], float] = time.time,
        memory: Memory | None = None,
        take_over: bool = False,
        ownership: Ownership | None = None,
    ) -> None:
        self.run = run
        self.recipe = recipe
        self.cluster = cluster
        self.rundir = rundir
        self.reading = RunReading(rundir)
        self.clock = clock
        self.memory = memory or Memory()
        self.take_over = take_over
        self.ownership = ownership  # None: nobody else can be on this run
        self.log = structlog.get_logger().bind(run=run.name)

    def look(self) -> Look:
        """Observe and decide."""
        observation = read_observation(
            self.run, self.recipe, self.cluster, self.reading, self.memory, take_over=self.take_over
        )
        now = self.clock()
        return Look(observation, decide(self.run, observation, now), now)

    def act(self, look: Look) -> Look:
        """Carry out what `look` decided. The decision becomes a Freeze when the outcome is unknown."""
        decision = look.decision
        if isinstance(decision, (Done, GiveUp, Refused, Freeze, Wait)):
            return look
        name = type(decision).__name__
        try:
            carry_out(decision, self.run, self.cluster, self.rundir)
        except (StorageUnavailable, ClusterUnavailable) as error:
            self.log.warning("unknown outcome", act=name, error=str(error))
            source = CLUSTER if isinstance(error, ClusterUnavailable) else RUN_DIRECTORY
            return replace(look, decision=Freeze(f"{name}: {error}", (source,), look.now + SLOWEST_POLL_SECONDS))
        except (Fenced, SubmitConflict) as error:
            # Somebody else was faster, or the name is taken: the next look shows it.
            self.log.warning("overtaken", act=name, error=str(error))
            return replace(look, decision=Wait("Switching", str(error), look.now + SLOWEST_POLL_SECONDS))
        except ConfigurationError as error:
            if look.observation.head is None:
                return replace(look, decision=Refused(str(error)))  # nothing has begun
            # The store turned read-only, say, or the cluster takes no such gang. The training may well go on; so do we.
            self.log.error("refused", act=name, error=str(error))
            of_cluster = isinstance(decision, (SubmitGang, DeleteGang, StopForPlanChange))
            source = CLUSTER if of_cluster else RUN_DIRECTORY
            return replace(look, decision=Freeze(str(error), (source,), look.now + REFUSED_SECONDS))
        self.log.info("done", act=name, attempt=look.observation.attempt, why=getattr(decision, "why", None))
        return look

    def step(self) -> Look:
        look = self.owned(self.look())
        return self.act(look)

    def owned(self, look: Look) -> Look:
        """`look` if the run is ours to act on; otherwise its decision says who looks after it."""
        ended = isinstance(look.decision, (Done, GiveUp, Refused))
        if self.ownership is None or ended or RUN_DIRECTORY in look.observation.unknown:
            return look
        soon = look.now + SLOWEST_POLL_SECONDS
        try:
            other = self.ownership.hold()
        except StorageUnavailable as error:
            return replace(look, decision=Freeze(f"owner.json: {error}", (RUN_DIRECTORY,), soon))
        except ConfigurationError as error:
            if look.observation.head is None:
                return replace(look, decision=Refused(str(error)))
            return replace(look, decision=Freeze(str(error), (RUN_DIRECTORY,), soon))
        if other is None:
            return look
        message = self.ownership.told(other)
        return replace(look, decision=OwnedByOther("Refused", message, look.now + READ_SECONDS, other.owner))

    def release(self) -> None:
        """Leave in order, so that nobody has to wait until our heartbeat counts as silent."""
        if self.ownership is None or not self.ownership.held:
            return
        try:
            self.ownership.release()
        except TrainerError as error:
            self.log.warning("the run was not released", error=str(error))


def resume_until_done(
    run: TrainingRun,
    cluster: Cluster,
    *,
    poll: float = POLL_SECONDS,
    on_change: Callable[[Look], None] | None = None,
    take_over: bool = False,
    stop: threading.Event | None = None,
    news: threading.Event | None = None,
    owner: str | None = None,
    config_maps: ConfigMaps | None = None,
) -> Outcome:
    """Keep `run` going on `cluster` until a commit at its target step exists, or nothing more can be done.

    `on_change` is called after each look that differs visibly from the one before. Between looks it waits `poll`
    seconds, or until `news` is set. `stop`, SIGTERM and SIGINT end this process's part and leave the training alone;
    call again, from anywhere, to adopt it. `owner` is our name in owner.json: that of this machine if not given. Raises
    ConfigurationError before anything is touched when the run, its recipe, its data or its run directory cannot be used.
    """
    log = structlog.get_logger().bind(run=run.name)
    stopping = stop or threading.Event()
    with _stop_on_signals(stopping):
        opened = _until_answered(lambda: _open(run, cluster, config_maps), stopping, log, on_error=POLL_SECONDS)
        if opened is None:
            return _interrupted(run, None)
        recipe, rundir = opened
        how = "the same command with --take-over"
        ownership = Ownership(rundir, owner or local_owner(), cluster.uid, take_over=take_over, how=how)
        caretaker = Caretaker(run, recipe, cluster, rundir, take_over=take_over, ownership=ownership)
        log.info("looking after the run", fingerprint=recipe.fingerprint(), run_directory=rundir.uri)
        try:
            return _look_after(caretaker, stopping, news, poll, on_change, log)
        finally:
            caretaker.release()


def _look_after(
    caretaker: Caretaker,
    stopping: threading.Event,
    news: threading.Event | None,
    poll: float,
    on_change: Callable[[Look], None] | None,
    log: structlog.typing.FilteringBoundLogger,
) -> Outcome:
    last: Look | None = None
    pause = poll
    while not stopping.is_set():
        if news is not None:
            news.clear()
        look = caretaker.step()
        changed = last is None or look.mark != last.mark
        if changed:
            _tell(log, look)
            if on_change is not None:
                on_change(look)
        decision = look.decision
        if isinstance(decision, (Done, GiveUp, Refused)):
            return Outcome(decision)
        # After an act, look at once: its result is news. The same act twice in a row had no visible result yet.
        if isinstance(decision, Freeze):
            pause = min(SLOWEST_POLL_SECONDS, 2 * max(pause, POLL_SECONDS))
        elif isinstance(decision, Wait):
            pause = poll
        else:
            pause = 0.0 if changed else POLL_SECONDS
        due = decision.until if isinstance(decision, (Wait, Freeze)) else None
        if pause:
            left = pause if due is None else max(0.01, min(pause, due - caretaker.clock()))
            _rest(stopping, news, left)
        last = look
    return _interrupted(caretaker.run, last)


def _rest(stopping: threading.Event, news: threading.Event | None, seconds: float) -> None:
    """Until `seconds` are over, or there is something to do."""
    if news is None:
        stopping.wait(seconds)
        return
    end = time.monotonic() + seconds
    while not news.is_set() and (left := end - time.monotonic()) > 0:
        if stopping.wait(min(0.1, left)):
            return


def _open(run: TrainingRun, cluster: Cluster, config_maps: ConfigMaps | None) -> tuple[Recipe, RunDirectory]:
    cluster.check(run)
    recipe = prepare(run, config_maps)
    return recipe, open_run(run, recipe)


def _until_answered[T](
    call: Callable[[], T], stopping: threading.Event, log: structlog.typing.FilteringBoundLogger, on_error: float
) -> T | None:
    """The result of `call`, asked again while a store or the cluster does not answer; None when told to stop meanwhile."""
    pause = on_error
    while not stopping.is_set():
        try:
            return call()
        except (StorageUnavailable, ClusterUnavailable) as error:
            log.warning("truth unknown", error=str(error))
            stopping.wait(pause)
            pause = min(SLOWEST_POLL_SECONDS, 2 * max(pause, POLL_SECONDS))
    return None


def _interrupted(run: TrainingRun, last: Look | None) -> Outcome:
    gang = last.observation.gang if last is not None else None
    if gang is not None and gang.phase in ("Running", "Queued", "Deleting"):
        what = f"gang {gang.name} goes on by itself ({gang.phase})"
    else:
        what = "no gang of the run is known to be running"
    return Outcome(
        Interrupted(
            f"stopped looking after run {run.name!r}; {what}. The same command again adopts it; "
            "to end it, set spec.suspend: true and run the command again"
        )
    )


def _tell(log: structlog.typing.FilteringBoundLogger, look: Look) -> None:
    decision, o = look.decision, look.observation
    log.info(
        getattr(decision, "word", type(decision).__name__),
        message=getattr(decision, "message", None) or getattr(decision, "why", None),
        attempt=o.attempt,
        committed_step=o.committed_step,
    )


@contextlib.contextmanager
def _stop_on_signals(stopping: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stopping`; a second one acts as it would have without us. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, _frame: object) -> None:
        stopping.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
