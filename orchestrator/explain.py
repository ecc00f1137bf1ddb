"""In plain words: what a run does, since when, why, what comes next and when, and what is left of its budgets. Pure.

The same facts as the decision they explain: nothing is read here, so that status, explain and the log cannot disagree.
"""

from datetime import UTC, datetime

from pydantic import Field

from orchestrator.api import TrainingRun
from orchestrator.budgets import NO_NEW_COMMIT, account, camel
from orchestrator.decisions import (
    AppendEnding,
    Decision,
    DeleteGang,
    Done,
    Freeze,
    GiveUp,
    RecordSubmitted,
    Refused,
    RequestCommit,
    StatusWord,
    StopForPlanChange,
    SubmitGang,
    SwapHead,
    Wait,
    WriteRecipe,
    WriteSpec,
)
from orchestrator.durations import about
from orchestrator.observation import Observation
from orchestrator.planning import shown
from orchestrator.preconditions import reached
from orchestrator.progressing import WORDS, live_progress
from trainer.frozen import Frozen
from trainer.plan import filling
from trainer.rundir.records import Category, Ending, Evidence

# Shown even when nothing was charged: what people ask for first. Others appear when they have been used.
ALWAYS_SHOWN: tuple[Category, ...] = ("application-error", "host-failure", "hang")
EVIDENCE_SHOWN = 4


class BudgetLine(Frozen):
    """One budget: `used` endings since the last new commit; `left` further ones are tolerated (None: unlimited)."""

    cause: str
    used: int
    limit: int | None
    left: int | None


class Explanation(Frozen):
    """The answer of `untildone explain`. Times are UNIX seconds; None where nobody knows or nothing is due."""

    run: str
    status: StatusWord
    what: str = Field(description="what it does or waits for, one sentence")
    since: float | None = None
    evidence: tuple[Evidence, ...] = ()
    next_action: str
    next_at: float | None = None
    attempt: int = 0
    start: int = 0
    plan: str | None = Field(default=None, description="device type of the current attempt")
    micro_batch: int | None = None
    accumulation: int | None = None
    step: int | None = None
    committed_step: int = 0
    target_step: int
    loss: float | None = None
    seconds_left: float | None = Field(default=None, description="to the target at the present pace, uninterrupted")
    last_ending: Ending | None = None
    budgets: tuple[BudgetLine, ...] = ()
    profiles: tuple[str, ...] = Field(default=(), description="the newest that were asked for, and what came of them")
    warnings: tuple[str, ...] = ()


def status_word(run: TrainingRun, o: Observation, decision: Decision) -> StatusWord:
    """The STATUS of the run: one of the fixed words, for lists, conditions and scripts."""
    match decision:
        case Freeze():
            return "TruthUnknown"
        case Refused():
            return "Refused"
        case Done():
            return "Completed"
        case GiveUp():
            return "BudgetExhausted"
        case Wait(word):
            return word
        case StopForPlanChange():
            return "Switching"
        case WriteSpec() if o.gang is not None and o.gang.phase in ("Queued", "Running"):
            return "Switching"
        case SwapHead() if o.head is not None and o.endings and o.endings[-1].cause == "plan-change":
            return "Switching"
        case DeleteGang() if run.spec.suspend:
            return "Suspended"
        case _:
            return "Saving" if reached(run, o) else _word_of_gang(o)


def explanation(run: TrainingRun, o: Observation, decision: Decision, now: float) -> Explanation:
    """Everything `explain` answers. `now` is UNIX seconds: acts are due now."""
    progress = live_progress(o)
    next_action, next_at = _next(run, o, decision, now)
    return Explanation(
        run=run.name,
        status=status_word(run, o, decision),
        what=_what(run, o, decision),
        since=_since(o, decision),
        evidence=_evidence(o, decision),
        next_action=next_action,
        next_at=next_at,
        attempt=o.attempt,
        start=o.head.start if o.head else 0,
        plan=shown(o.spec.plan) if o.spec else None,
        micro_batch=o.spec.plan.micro_batch if o.spec else None,
        accumulation=o.spec.plan.accumulation if o.spec else None,
        step=progress.step if progress else None,
        committed_step=o.committed_step,
        target_step=run.spec.target_step,
        loss=progress.loss if progress else None,
        seconds_left=progress.seconds_left(run.spec.target_step) if progress else None,
        last_ending=o.endings[-1] if o.endings else None,
        budgets=budget_lines(run, o),
        warnings=(
            *(alarm.message for alarm in o.alarms),
            *(o.view.warnings if o.view else ()),
            *((lost,) if o.spec and (lost := filling(o.spec.plan)) else ()),
        ),
    )


def budget_lines(run: TrainingRun, o: Observation) -> tuple[BudgetLine, ...]:
    """What is used and left of each budget that matters now; the stop without new commits comes last."""
    books = account(o.endings, o.committed_step)
    causes: list[Category] = list(dict.fromkeys((*ALWAYS_SHOWN, *books.charged)))
    lines = []
    for cause in causes:
        used, limit = books.charged.get(cause, 0), run.spec.budgets.of(cause)
        left = None if limit is None else max(0, limit - used)
        lines.append(BudgetLine(cause=cause, used=used, limit=limit, left=left))
    limit = run.spec.budgets.no_new_commit
    left = max(0, limit - books.without_commit)
    lines.append(BudgetLine(cause=NO_NEW_COMMIT, used=books.without_commit, limit=limit, left=left))
    return tuple(lines)


def status_line(e: Explanation) -> str:
    """One line for lists: name, STATUS, steps, plan, attempt."""
    step = "-" if e.step is None else str(e.step)
    plan = e.plan or "-"
    split = f" {e.micro_batch}×{e.accumulation}" if e.micro_batch else ""
    return (
        f"{e.run} {e.status} step={step}/{e.target_step} committed={e.committed_step} plan={plan}{split} "
        f"attempt={e.attempt}.{e.start}"
    )


def render(e: Explanation) -> str:
    """The explanation as text for one screen."""
    step = "" if e.step is None else f"step {e.step}, "
    lines = [
        f"{e.run}: {e.status}",
        f"  What     {e.what}",
        f"  Since    {when(e.since)}",
        f"  Next     {e.next_action}" + (f" ({when(e.next_at)})" if e.next_at is not None else ""),
        f"  Steps    {step}{e.committed_step} committed, target {e.target_step}{_left(e.seconds_left)}",
    ]
    if e.plan:
        batch = f"{e.micro_batch} × {e.accumulation}" if e.micro_batch else "?"
        start = f"{e.attempt}.{e.start}" if e.start else f"{e.attempt} (not started)"
        lines.append(f"  Attempt  {start} on {e.plan}, micro-batch × accumulation {batch}")
    if e.last_ending is not None:
        end = e.last_ending
        start = f"{end.attempt}.{end.start}" if end.start is not None else str(end.attempt)
        charged = "charged" if end.charged else "not charged"
        lines.append(f"  Last end {start}: {end.cause} ({charged}), step {end.last_committed_step} committed")
    for index, fact in enumerate(e.evidence[:EVIDENCE_SHOWN]):
        head = "  Evidence " if index == 0 else "           "
        # What a program said of itself ends with the fix: it is never cut short.
        value = " ".join(fact.value.split()) if fact.field == "reason" else _one_line(fact.value)
        lines.append(f"{head}{fact.source}: {fact.field} = {value}")
    if len(e.evidence) > EVIDENCE_SHOWN:
        lines.append(f"           and {len(e.evidence) - EVIDENCE_SHOWN} more (--json)")
    for index, budget in enumerate(e.budgets):
        head = "  Budgets  " if index == 0 else "           "
        limit = "unlimited" if budget.limit is None else f"of {budget.limit}, {budget.left} left"
        lines.append(f"{head}{camel(budget.cause)}: {budget.used} used {limit}")
    lines.extend(f"  Profile  {profile}" for profile in e.profiles)
    lines.extend(f"  Warning  {warning}" for warning in e.warnings)
    return "\n".join(lines)


def when(seconds: float | None) -> str:
    """A time for people: UTC, to the second."""
    if seconds is None:
        return "not known"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# -- inside


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f", {about(seconds)} left at this pace"


def _what(run: TrainingRun, o: Observation, decision: Decision) -> str:
    match decision:
        case Freeze(message) | Refused(message) | GiveUp(message):
            return message
        case Done(_, message) | Wait(_, message):
            return message
        case WriteRecipe(recipe):
            return f"the run begins: recipe {recipe.name}, fingerprint {recipe.fingerprint()[:12]}"
        case WriteSpec(spec, why):
            return f"attempt {spec.attempt} is planned on {shown(spec.plan)}: {why}"
        case SwapHead(attempt):
            return f"attempt {attempt} takes over"
        case SubmitGang(spec):
            return f"attempt {spec.attempt} is being submitted on {shown(spec.plan)}"
        case RecordSubmitted(attempt):
            return f"attempt {attempt} was accepted by the cluster"
        case AppendEnding(ending):
            start = f"{ending.attempt}.{ending.start}" if ending.start is not None else f"attempt {ending.attempt}"
            return f"{start} ended: {ending.cause}"
        case RequestCommit(attempt, _, why):
            return f"attempt {attempt} is asked for a commit: {why}"
        case DeleteGang(name, _, _, why) | StopForPlanChange(name, _, _, why):
            return f"{name} is being stopped: {why}"


def _next(run: TrainingRun, o: Observation, decision: Decision, now: float) -> tuple[str, float | None]:
    """(what happens next, when); None: when news arrives."""
    match decision:
        case Freeze(_, sources, until):
            return f"ask {' and '.join(sources)} again; nothing is changed meanwhile", until
        case Refused():
            return "nothing, until the request is corrected", None
        case Done():
            return f"nothing; check it with: untildone verify {run.spec.run_directory}", None
        case GiveUp():
            return "nothing, until the budget is raised", None
        case Wait(word, _, until):
            return _after_waiting(o, word), until
        case WriteRecipe():
            return "write recipe.json, then plan the first attempt", now
        case WriteSpec(spec):
            stop = f"stop attempt {o.attempt} at a commit, then " if o.gang and o.gang.phase == "Running" else ""
            return f"{stop}submit attempt {spec.attempt}", now
        case SwapHead(attempt):
            return f"let HEAD name attempt {attempt}, then submit it", now
        case SubmitGang(spec):
            return f"create {spec.gang}", now
        case RecordSubmitted():
            return "record that the cluster accepted it", now
        case AppendEnding(ending):
            return f"write down that it ended ({ending.cause}), then decide how to go on", now
        case RequestCommit(attempt):
            return f"wait until attempt {attempt} has committed, then stop it", now
        case DeleteGang(name, _, grace):
            return f"delete {name}: SIGTERM, and SIGKILL after {grace:g} s", now
        case StopForPlanChange(name, _, grace, _, old, new):
            return f"stop {name} with {grace:g} s to commit, then go on: {shown(old)} → {shown(new)}", now


def _after_waiting(o: Observation, word: StatusWord) -> str:
    match word:
        case "Queued" | "Preempted":
            return "the queue admits the gang again by itself; later the ladder is looked through"
        case "BackingOff":
            return f"submit attempt {o.attempt + 1}"
        case "Suspended":
            return "nothing, until spec.suspend is false"
        case "Switching":
            return f"submit attempt {o.attempt + 1} when the present one has ended"
        case "Saving":
            return "the commit, then on"
        case "Starting" | "Restoring" | "Compiling":
            return "the first step"
        case _:
            return "the next commit"


def _since(o: Observation, decision: Decision) -> float | None:
    """When the present state began, where a document or the cluster says so."""
    start, gang, last = o.current_start, o.gang, o.endings[-1] if o.endings else None
    match decision:
        case Freeze() | Refused():
            return None
        case Done() | GiveUp() | Wait("BackingOff"):
            return last.ended if last else None
        case AppendEnding(ending):
            return ending.ended
        case Wait("Queued" | "Preempted"):
            return gang.queued_since if gang else None
        case _:
            if live_progress(o) is not None and start is not None and start.record is not None:
                return start.record.time
            return o.live_admission.began if o.live_admission else None


def _evidence(o: Observation, decision: Decision) -> tuple[Evidence, ...]:
    """What the answer rests on."""
    match decision:
        case Freeze(_, sources):
            return tuple(
                Evidence(source=source, field="answer", value=o.unknown.get(source, "contradicts itself"))
                for source in sources
            )
        case GiveUp(_, _, evidence):
            return evidence
        case AppendEnding(ending):
            return ending.evidence
        case Done():
            return (Evidence(source="HEAD", field="commit", value=str(o.head.commit if o.head else None)),)
        case Wait("Queued" | "Preempted" | "BackingOff"):
            return o.endings[-1].evidence if o.endings else ()
        case _:
            return ()


def _word_of_gang(o: Observation) -> StatusWord:
    """STATUS while something is written down: what the gang does meanwhile."""
    gang, progress = o.gang, live_progress(o)
    if gang is not None and gang.phase == "Queued":
        last = gang.admissions[-1] if gang.admissions else None
        return "Preempted" if last is not None and last.queue_signals else "Queued"
    return WORDS[progress.phase] if progress is not None else "Starting"


def _one_line(text: str, limit: int = 100) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
