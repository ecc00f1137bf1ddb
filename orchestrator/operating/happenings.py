"""What there is to tell about a run, as Kubernetes Events: one per change of state, each with its evidence. Pure.

A happening is derived from facts that stay (the ledger, HEAD, the gang), and its name from what happened: any number of
operators, started any number of times, come to the same names, and the API server takes each name once. Events expire
after an hour, so what the run's written status shows already is not told again.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.api import TrainingRun
from orchestrator.conditions import ALARM_REASONS
from orchestrator.daemon import Look
from orchestrator.decisions import (
    AppendEnding,
    DeleteGang,
    Done,
    Freeze,
    GiveUp,
    OwnedByOther,
    Refused,
    RequestCommit,
    StopForPlanChange,
    Wait,
    WriteSpec,
)
from orchestrator.planning import shown
from orchestrator.status import RunStatus
from trainer.plan import filling
from trainer.rundir.records import Category, Ending, Evidence

NOTE_BYTES = 1024
# Reasons of Events are fixed words; that of an ending is its cause.
REASONS: dict[Category, str] = {
    "preempted": "Preempted",
    "host-failure": "HostFailure",
    "maintenance": "Maintenance",
    "hang": "Hang",
    "application-error": "ApplicationError",
    "bad-configuration": "BadConfiguration",
    "storage": "StorageFailure",
    "fenced": "Fenced",
    "non-finite": "NonFiniteLoss",
    "mixed-gang": "MixedGang",
    "plan-change": "PlanChanged",
    "deactivated": "Deactivated",
    "gone": "GangGone",
    "completed": "AttemptCompleted",
    "unknown": "EndedUnknown",
    "unknown-while-absent": "EndedWhileAbsent",
}
NORMAL: frozenset[Category] = frozenset(
    {"preempted", "maintenance", "plan-change", "completed", "unknown-while-absent"}
)
# After these the gang comes up again where it was, without waiting in the queue.
RESTARTED: frozenset[Category] = frozenset({"host-failure", "hang", "storage", "unknown", "unknown-while-absent"})


@dataclass(frozen=True)
class Subject:
    """The object that something happens to."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class Happening:
    """`what` identifies it within the run. `after` is how far the run had come: (attempt, start)."""

    what: str
    reason: str
    note: str
    after: tuple[int, int]
    warning: bool = False

    def name(self, subject: Subject) -> str:
        """Of its Event: the same for whoever tells it."""
        digest = hashlib.sha256(f"{subject.uid}/{self.what}".encode()).hexdigest()[:20]
        return f"{subject.name}.{digest}"


def happenings(run: TrainingRun, look: Look) -> tuple[Happening, ...]:
    """Everything that `look` shows to have happened, oldest first; most of it was told before."""
    return (*_ledger(look), *_attempt(look), *_alarms(look), *_state(run, look))


def refusal(generation: int, message: str, at: tuple[int, int] = (0, 0)) -> Happening:
    """A generation of the spec is refused."""
    digest = hashlib.sha256(message.encode()).hexdigest()[:12]
    return Happening(f"state/refused/{generation}/{digest}", "Refused", _note(message), at, warning=True)


def told_before(happening: Happening, written: RunStatus | None) -> bool:
    """Whether the written status of the run shows `happening`: an operator told it, and then wrote the status."""
    if written is None:
        return False
    kind = happening.what.partition("/")[0]
    reached = (written.attempt or 0, written.start or 0)
    if kind == "ending":
        if not written.attempt:
            return True  # a run that was trained elsewhere: its past is in the ledger
        oldest = [(entry.attempt, entry.start or 0) for entry in written.endings]
        return happening.after in oldest or (bool(oldest) and happening.after < min(oldest))
    if kind in ("submitted", "filled", "admitted"):
        admitted = written.condition("Admitted").status == "True"
        return happening.after[0] < reached[0] or (happening.after <= reached and (kind != "admitted" or admitted))
    if kind in ("training", "set-aside"):
        return happening.after <= reached
    if kind == "alarm":
        return happening.note.partition(": ")[2][:200] in written.condition("Degraded").message
    word = written.condition("Succeeded").reason
    if kind != "state" or word != ("Refused" if happening.reason == "OwnedByOther" else happening.reason):
        return False
    return word != "Refused" or (written.message or "")[:200] == happening.note[:200]


def _ledger(look: Look) -> Iterator[Happening]:
    for ending in look.observation.endings:
        start = f"start {ending.attempt}.{ending.start}" if ending.start is not None else f"attempt {ending.attempt}"
        charged = "charged to its budget" if ending.charged else "not charged"
        note = f"{start} ended: {ending.cause} ({charged}); step {ending.last_committed_step} is committed"
        yield Happening(
            f"ending/{ending.attempt}/{ending.key}",
            REASONS[ending.cause],
            _note(note, ending.evidence),
            (ending.attempt, ending.start or 0),
            ending.cause not in NORMAL,
        )


def _attempt(look: Look) -> Iterator[Happening]:
    o = look.observation
    if o.head is None or o.spec is None or isinstance(look.decision, AppendEnding):
        return  # first the end of what was before
    where, start = shown(o.spec.plan), o.current_start
    at = (o.attempt, 0)
    if o.submitted is not None:
        note = f"attempt {o.attempt} on {where} is {o.spec.gang}, uid {o.submitted.gang_uid}"
        yield Happening(f"submitted/{o.attempt}", "Submitted", note, at)
        if lost := filling(o.spec.plan):
            note = f"attempt {o.attempt} on {where}: {lost}"
            yield Happening(f"filled/{o.attempt}", "EmptyRows", note, at, warning=True)
    admission = o.live_admission
    if admission is not None and o.gang is not None:
        last = o.endings[-1] if o.endings and o.endings[-1].attempt == o.attempt else None
        again = last is not None and last.cause in RESTARTED
        note = f"{o.gang.name} {'comes up again' if again else 'was admitted'} on {where} ({admission.key})"
        what = f"admitted/{o.attempt}/{o.gang.uid}/{admission.key}"
        yield Happening(what, "Restarted" if again else "Admitted", note, at)
    if start is None or start.record is None:
        return
    restored, now = start.record.restored, (o.attempt, start.start)
    note = f"start {o.attempt}.{start.start} continues from {restored or 'step 0'} with {start.record.devices} devices"
    yield Happening(f"training/{o.attempt}.{start.start}", "Training", note, now)
    before = _last_before(o.endings, now)
    if before is not None and (restored.step if restored else 0) < before.last_committed_step:
        note = (
            f"start {o.attempt}.{start.start} continues from {restored or 'step 0'}, although step "
            f"{before.last_committed_step} had been committed: later commits were damaged and set aside; see "
            f"attempts/{o.attempt}/{start.start}/ in the run directory"
        )
        yield Happening(f"set-aside/{o.attempt}.{start.start}", "SetAside", note, now, warning=True)


def _alarms(look: Look) -> Iterator[Happening]:
    """What the trainer says about the data it trains on."""
    o = look.observation
    for alarm in o.alarms:
        note = _note(f"start {alarm.attempt}.{alarm.start}: {alarm.message}")
        at = (o.attempt, o.head.start if o.head else 0)
        yield Happening(f"alarm/{alarm.name}", ALARM_REASONS[alarm.kind], note, at, warning=True)


def _state(run: TrainingRun, look: Look) -> Iterator[Happening]:
    """What was decided, where that is a change of state by itself."""
    o, decision = look.observation, look.decision
    at = (o.attempt, o.head.start if o.head else 0)
    place = f"{at[0]}.{at[1]}"
    generation = run.metadata.generation
    match decision:
        case Done(step, message):
            yield Happening(f"state/completed/{step}", "Completed", _note(message), at)
        case GiveUp(message, cause, evidence):
            what = f"state/exhausted/{cause}/{len(o.endings)}/{generation}"
            yield Happening(what, "BudgetExhausted", _note(message, evidence), at, warning=True)
        case Refused(message):
            yield refusal(generation or 0, message, at)
        case OwnedByOther(_, message, _, owner):
            yield Happening(f"state/owned/{generation}/{owner}", "OwnedByOther", _note(message), at, warning=True)
        case Freeze(message, sources):
            what = f"state/unknown/{place}/{'+'.join(sources)}"
            yield Happening(what, "TruthUnknown", _note(message), at, warning=True)
        case Wait("Suspended", message):
            yield Happening(f"state/suspended/{generation}/{place}", "Suspended", _note(message), at)
        case Wait("BackingOff", message):
            yield Happening(f"state/backing-off/{place}/{len(o.endings)}", "BackingOff", _note(message), at)
        case RequestCommit(attempt, identifier, why):
            note = f"attempt {attempt} was asked for a commit: {why}"
            yield Happening(f"requested/{identifier}", "CommitRequested", _note(note), at)
        case WriteSpec(spec, why) if o.spec is not None and (
            o.live_admission or shown(spec.plan) != shown(o.spec.plan)
        ):
            note = f"attempt {spec.attempt} is planned on {shown(spec.plan)}: {why}"
            yield Happening(f"switching/{spec.attempt}", "Switching", _note(note), at)
        case StopForPlanChange(name, uid, _, why):
            yield Happening(f"stopping/{uid}", "Stopping", _note(f"{name} is stopped: {why}"), at)
        case DeleteGang(name, uid, _, why) if o.gang is not None and o.gang.uid == uid:
            yield Happening(f"stopping/{uid}", "Stopping", _note(f"{name} is deleted: {why}"), at)


def _last_before(endings: tuple[Ending, ...], at: tuple[int, int]) -> Ending | None:
    earlier = [ending for ending in endings if (ending.attempt, ending.start or 0) < at]
    return earlier[-1] if earlier else None


def _note(text: str, evidence: tuple[Evidence, ...] = ()) -> str:
    """`text` and the evidence, as long as an Event's note may be."""
    parts = [text, *(f"{fact.source}: {fact.field} = {' '.join(fact.value.split())}" for fact in evidence)]
    note = "; ".join(parts).encode()
    return note.decode() if len(note) <= NOTE_BYTES else note[: NOTE_BYTES - 3].decode(errors="ignore") + "…"
