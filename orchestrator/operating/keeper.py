"""Looks after one TrainingRun object: which of its specs counts, one look and one act per visit, and what is told of it.

A spec counts once it has been accepted: readable, allowed, prepared, and not contradicting the run. Until then, or when
it never comes to that, the last accepted one goes on to count: a typo must not harm a run that trains. It stands in the
status, so that an operator that comes later knows it too.
"""

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

import structlog

from orchestrator.api import TrainingRun, from_object
from orchestrator.clusters.base import Cluster, ClusterUnavailable
from orchestrator.clusters.kubernetes_api import Object
from orchestrator.daemon import Caretaker, Look
from orchestrator.decisions import Done, Freeze, GiveUp, Refused, Wait
from orchestrator.memory import Memory
from orchestrator.operating.configuration import Configuration
from orchestrator.operating.events import Teller
from orchestrator.operating.happenings import Subject, happenings, refusal
from orchestrator.operating.lease import Requests
from orchestrator.operating.preparation import Preparation, Prepared, Wrong, prepare_spec
from orchestrator.operating.status_writer import StatusWriter
from orchestrator.operating.tenancy import refusals
from orchestrator.operating.words import explained, of_generation, refused_message, with_refusal, with_rights
from orchestrator.owners import BEAT_SECONDS, Ownership
from orchestrator.status import RunStatus, refused_status, status_of
from orchestrator.status_model import AcceptedSpec
from trainer.errors import ConfigurationError

# Annotation: the owner that the run is taken from, or the cluster that is gone for good.
TAKE_OVER = "untildone.dev/take-over-from"
LIVE_SECONDS = 10.0  # of a live start the run directory is read at least this far apart
IDLE_SECONDS = BEAT_SECONDS  # without one it is visited to renew owner.json
AT_ONCE, SOON_SECONDS = 0.0, 0.5


@dataclass
class Surroundings:
    """What all keepers of one operator share."""

    api: Requests
    clusters: Callable[[str], Cluster]  # by namespace
    configuration: Configuration
    threads: Executor
    wake: Callable[[str, str], None]  # namespace, name: the run wants a visit
    cluster_uid: Callable[[], str]
    identity: str
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    prepare: Callable[[TrainingRun, Cluster, Requests, bool], Prepared] = prepare_spec
    dice: random.Random = field(default_factory=random.Random)


@dataclass
class Wanted:
    """A spec as it stands in the object, and what became of it."""

    key: object
    generation: int
    run: TrainingRun | None = None
    wrong: str | None = None
    preparation: Preparation | None = None


class Keeper:
    """Of one object, by its uid. For one worker at a time."""

    def __init__(self, obj: Object, around: Surroundings) -> None:
        metadata = obj["metadata"]
        self.subject = Subject(str(metadata["namespace"]), str(metadata["name"]), str(metadata["uid"]))
        self.log = structlog.get_logger().bind(run=self.subject.name, namespace=self.subject.namespace)
        self._around = around
        written = RunStatus.of(obj)
        self._memory = Memory(around.monotonic)
        self._memory.highest_attempt = (written.attempt or 0) if written else 0
        self._writer = StatusWriter(around.api, self.subject, written, around.monotonic)
        self._teller = Teller(around.api, self.subject, around.identity, written, around.clock)
        self._status: RunStatus | None = None  # as it should be
        self._wanted: Wanted | None = None
        self._recalled: Preparation | None = None  # of the spec that an operator before us accepted
        self._caretaker: Caretaker | None = None  # of the last accepted spec
        self._last: Look | None = None
        self._frozen = 0  # looks in a row on which nothing was certain
        self._done = False  # the accepted spec has been carried out to its end

    @property
    def status(self) -> RunStatus | None:
        """What is to be told of the run now."""
        return self._status or self._writer.written

    # -- a visit

    def visit(self, obj: Object) -> float | None:
        """One look at the run as `obj` wants it, and at most one act. After how many seconds to come again.

        None: only news can change anything. Raises ClusterUnavailable when a status could not be written.
        """
        wanted = self._take(obj)
        due = [wanted.preparation.advance()] if wanted.preparation is not None else []
        wrong = self._accept(wanted)
        if wrong is not None and self._caretaker is None:
            due.append(self._recall(obj, wanted.generation))
        if wrong is not None and wanted.preparation is not None and isinstance(wanted.preparation.outcome, Prepared):
            due.append(IDLE_SECONDS)  # prepared, but something did not answer when it was to count
        if self._caretaker is None:
            due.append(self._show_waiting(wanted, wrong))
        elif self._done and wrong is None:
            due.append(self._write())
        else:
            due += self._look_after(wanted, wrong)
        return min((seconds for seconds in due if seconds is not None), default=None)

    def fail(self, error: Exception) -> None:
        """A visit ended with an error that nobody foresaw: say so, as far as that is possible."""
        wanted = self._wanted
        run = self._caretaker.run if self._caretaker else wanted.run if wanted else None
        if run is None:
            return
        told = self._writer.written.observed_generation if self._writer.written is not None else None
        if told is not None and told > (run.metadata.generation or 0):  # a later spec was refused, and that was said
            run = of_generation(run, told)
        message = f"unexpected {type(error).__name__}: {error}; nothing is decided meanwhile, see the operator's log"
        now = self._around.clock()
        self._status = status_of(run, None, Freeze(message, ("operator",), now), self._writer.written, now)
        self._write()

    def close(self) -> None:
        """The object is gone: release the run, so that nobody has to wait for it."""
        for preparation in (self._wanted.preparation if self._wanted is not None else None, self._recalled):
            if preparation is not None:
                preparation.cancel()
        if self._caretaker is not None:
            self._caretaker.release()

    # -- which spec counts

    def _take(self, obj: Object) -> Wanted:
        """The spec in `obj`, as far as it has come."""
        metadata = obj["metadata"]
        take_over = (metadata.get("annotations") or {}).get(TAKE_OVER)
        key = (metadata.get("generation"), take_over)
        if self._wanted is not None and self._wanted.key == key:
            return self._wanted
        if self._wanted is not None and self._wanted.preparation is not None:
            self._wanted.preparation.cancel()
        wanted = Wanted(key, int(metadata.get("generation") or 0))
        self._wanted, self._done = wanted, False
        try:
            run = wanted.run = from_object(obj)
            refused = refusals(run, self.subject.namespace, self._around.configuration.run_directories)
            wanted.wrong = "; ".join(refused) or None
        except ConfigurationError as error:
            wanted.wrong = str(error)
        if wanted.run is not None and wanted.wrong is None:
            wanted.preparation = self._preparation(wanted.run)
        self.log.info("a spec", generation=wanted.generation, refused=wanted.wrong)
        return wanted

    def _preparation(self, run: TrainingRun) -> Preparation:
        around, written = self._around, self._writer.written
        accepted = written.accepted if written is not None else None
        before = accepted is not None and accepted.generation == run.metadata.generation

        def prepare() -> Prepared:
            return around.prepare(run, around.clusters(self.subject.namespace), around.api, before)

        def done() -> None:
            around.wake(self.subject.namespace, self.subject.name)

        return Preparation(prepare, around.threads, done, around.monotonic)

    def _accept(self, wanted: Wanted) -> Wrong | None:
        """Let the wanted spec count if it can; otherwise what is wrong with it, None while nobody knows yet."""
        if wanted.wrong is not None:
            return Wrong(wanted.wrong, certain=True)
        assert wanted.preparation is not None
        outcome = wanted.preparation.outcome
        if not isinstance(outcome, Prepared):
            return outcome
        current = self._caretaker
        if current is not None and current.run is outcome.run:
            return None
        if current is not None and current.run.spec != outcome.run.spec:
            refused = self._contradiction(outcome)
            if refused is not None:
                if refused.certain:
                    wanted.preparation.reject(refused.message)
                return refused
        try:
            self._adopt(outcome)
        except ClusterUnavailable as error:  # the cluster's identity is not known yet
            return Wrong(str(error), certain=False)
        return None

    def _recall(self, obj: Object, generation: int) -> float | None:
        """Nothing counts yet, and the newest spec does not: go on with the one that counted before us, if there is one."""
        written = self._writer.written
        accepted = written.accepted if written is not None else None
        if accepted is None or accepted.generation == generation:
            return None
        if self._recalled is None:
            try:
                run = of_generation(from_object({**obj, "spec": json.loads(accepted.spec)}), accepted.generation)
            except ConfigurationError:
                return None  # of another version
            if refusals(run, self.subject.namespace, self._around.configuration.run_directories):
                return None
            self.log.info("the last accepted spec is prepared", generation=accepted.generation)
            self._recalled = self._preparation(run)
        again = self._recalled.advance()
        outcome = self._recalled.outcome
        if isinstance(outcome, Prepared):
            try:
                self._adopt(outcome)
            except ClusterUnavailable:
                return SOON_SECONDS
        return again

    def _contradiction(self, prepared: Prepared) -> Wrong | None:
        """What the run has against another spec than the one that counts: seen by a look with no memory."""
        memory = Memory(self._around.monotonic)
        memory.highest_attempt = self._memory.highest_attempt
        asked = TAKE_OVER in prepared.run.metadata.annotations
        look = Caretaker(
            prepared.run,
            prepared.recipe,
            prepared.cluster,
            prepared.rundir,
            clock=self._around.clock,
            memory=memory,
            take_over=asked,
        ).look()
        if isinstance(look.decision, Refused):
            return Wrong(look.decision.message, certain=True)
        return Wrong(look.decision.message, certain=False) if isinstance(look.decision, Freeze) else None

    def _adopt(self, prepared: Prepared) -> None:
        run, around = prepared.run, self._around
        before = self._caretaker
        if before is not None and before.run.spec.run_directory != run.spec.run_directory:
            before.release()
            self._memory = Memory(around.monotonic)
        if before is not None:
            self._memory.forget(("fits/",))  # the rungs are numbered anew
        take_over_from = run.metadata.annotations.get(TAKE_OVER)
        ownership = Ownership(
            prepared.rundir,
            self.subject.uid,
            around.cluster_uid(),
            take_over_from=take_over_from,
            how=self._annotation("OWNER"),
            monotonic=around.monotonic,
            clock=around.clock,
        )
        self._caretaker = Caretaker(
            run,
            prepared.recipe,
            prepared.cluster,
            prepared.rundir,
            clock=around.clock,
            memory=self._memory,
            ownership=ownership,
        )
        self.log.info("accepted", generation=run.metadata.generation, fingerprint=prepared.recipe.fingerprint())

    # -- looking after the run

    def _look_after(self, wanted: Wanted, wrong: Wrong | None) -> list[float | None]:
        assert self._caretaker is not None
        look = self._caretaker.step()
        submitted = look.observation.submitted
        cluster = submitted.cluster_uid if submitted is not None else ""
        # From the next look on: the user names the cluster that is gone for good.
        self._caretaker.take_over = cluster == self._caretaker.run.metadata.annotations.get(TAKE_OVER)
        look = explained(look, self._annotation(cluster))
        changed = self._last is None or look.mark != self._last.mark
        self._last = look
        decision = look.decision
        if changed:
            self._tell_log(look)
        ended = isinstance(decision, (Done, GiveUp))
        if ended or isinstance(decision, Refused):
            self._caretaker.release()
        self._done = ended
        again = self._next(look, changed)
        # In the midst of several acts no status is written: it takes as long as an act, and where they lead is what counts.
        return [self._show(wanted, wrong, look, passing=again == AT_ONCE), again]

    def _next(self, look: Look, changed: bool) -> float | None:
        decision, gang = look.decision, look.observation.gang
        self._frozen = self._frozen + 1 if isinstance(decision, Freeze) else 0
        if isinstance(decision, (Done, GiveUp)):
            return None
        if isinstance(decision, Refused):
            return IDLE_SECONDS
        if not isinstance(decision, (Wait, Freeze)):
            return AT_ONCE if changed else SOON_SECONDS
        if isinstance(decision, Freeze):  # one answer that was not given, most often: the next look has it
            pause = min(LIVE_SECONDS, SOON_SECONDS * 2.0 ** min(self._frozen - 1, 10))
            return pause * self._around.dice.uniform(0.9, 1.0)
        assert self._caretaker is not None
        live = gang is not None and gang.phase in ("Running", "Deleting")
        poll = max(LIVE_SECONDS, self._caretaker.run.spec.progress_every) if live else IDLE_SECONDS
        poll *= self._around.dice.uniform(0.9, 1.0)  # so that runs that began together do not stay together
        if decision.until is None:
            return poll
        return min(poll, max(SOON_SECONDS, decision.until - self._around.clock()))

    def _annotation(self, value: str) -> str:
        """How a user takes the run over."""
        return f"kubectl annotate trun {self.subject.name} -n {self.subject.namespace} --overwrite {TAKE_OVER}={value}"

    # -- what is told

    def _show(self, wanted: Wanted, wrong: Wrong | None, look: Look, passing: bool) -> float | None:
        """What `look` says; and, when the spec that stands in the object is refused, that.

        `passing`: another look follows at once, so there are only Events, unless the spec is new.
        """
        assert self._caretaker is not None
        run, written = self._caretaker.run, self._writer.written
        refused = wrong is not None and wrong.certain
        if refused:
            run = of_generation(run, wanted.generation)
        self._status = self._with_accepted(status_of(run, look.observation, look.decision, written, look.now))
        self._teller.tell(happenings(run, look))
        if wrong is not None and refused:
            message = refused_message(wrong.message, self._caretaker.run.metadata.generation or 0)
            self._status = with_refusal(self._status, message, written, look.now)
            self._teller.tell([refusal(wanted.generation, message)])
        known = written is not None and written.observed_generation == self._status.observed_generation
        return None if passing and known and not refused else self._write()

    def _with_accepted(self, status: RunStatus) -> RunStatus:
        assert self._caretaker is not None
        run = self._caretaker.run
        spec = run.spec.model_dump_json(by_alias=True, exclude_unset=True)
        return status.model_copy(update={"accepted": AcceptedSpec(generation=run.metadata.generation or 0, spec=spec)})

    def _show_waiting(self, wanted: Wanted, wrong: Wrong | None) -> float | None:
        """No spec has been accepted yet, by us."""
        now, written = self._around.clock(), self._writer.written
        if wrong is not None and wrong.certain:
            self._teller.tell([refusal(wanted.generation, wrong.message)])
        if wanted.run is None:
            assert wrong is not None
            self._status = refused_status(wrong.message, wanted.generation, written, now)
        elif wrong is not None:
            until = now + IDLE_SECONDS
            message = with_rights(wrong.message)
            decision = Refused(message) if wrong.certain else Freeze(message, ("run directory",), until)
            self._status = status_of(wanted.run, None, decision, written, now)
        elif written is None or written.observed_generation != wanted.generation:
            waiting = Wait("Starting", "the recipe is read, and the data is looked at")
            self._status = status_of(wanted.run, None, waiting, written, now)
        else:
            return None  # an operator before us said more than we can say now
        return self._write()

    def _write(self) -> float | None:
        return self._writer.write(self._status) if self._status is not None else None

    def _tell_log(self, look: Look) -> None:
        decision, o = look.decision, look.observation
        self.log.info(
            getattr(decision, "word", "TruthUnknown" if isinstance(decision, Freeze) else type(decision).__name__),
            message=getattr(decision, "message", None) or getattr(decision, "why", None),
            attempt=o.attempt,
            start=o.head.start if o.head else 0,
            committed_step=o.committed_step,
        )
