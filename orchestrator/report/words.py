"""What the report says in plain words: causes, evidence, counts. No object name is needed to read it."""

import signal

from trainer.rundir.records import Ending, Evidence

# One sentence per cause, as someone would say it who was there.
CAUSES: dict[str, str] = {
    "preempted": "The cluster took the devices away.",
    "host-failure": "A host process died and took its gang with it.",
    "maintenance": "The node was taken down for maintenance.",
    "hang": "No step for longer than the limit; the watchdog ended it.",
    "application-error": "The trainer ended with an error.",
    "bad-configuration": "The trainer refused its configuration.",
    "storage": "The store did not answer, or was full.",
    "fenced": "A later start had taken over; this one could no longer commit.",
    "non-finite": "The loss was not a finite number.",
    "mixed-gang": "Processes of different attempts had met; none of them began.",
    "plan-change": "Stopped on purpose, at a commit, to continue on another plan.",
    "deactivated": "Somebody deactivated it.",
    "gone": "Its gang was gone from the cluster.",
    "completed": "The target step is committed.",
    "unknown": "It ended, and nothing says why.",
    "unknown-while-absent": "It ended while no orchestrator was looking.",
}

# Verbatim values that deserve a translation beside them.
EXIT_WORDS: dict[str, str] = {
    "0": "target committed",
    "1": "application error",
    "64": "bad configuration",
    "74": "storage unavailable",
    "75": "preempted, saw SIGTERM and left in order",
    "76": "fenced",
    "77": "watchdog: hang",
    "78": "non-finite loss",
    "79": "mixed gang",
}
SIGNAL_WORDS: dict[int, str] = {
    signal.SIGKILL: "SIGKILL, killed at once without a chance to save",
    signal.SIGTERM: "SIGTERM, asked to leave",
    signal.SIGABRT: "SIGABRT, a library gave up",
    signal.SIGSEGV: "SIGSEGV, a crash in native code",
}


def evidence_lines(ending: Ending) -> list[str]:
    """Each fact that decided the cause: object, field = value, and what the value means where it is a code."""
    return [f"{fact.source}: {fact.field} = {fact.value}{_meaning(fact)}" for fact in ending.evidence]


def _meaning(fact: Evidence) -> str:
    if fact.field == "exit code" and fact.value in EXIT_WORDS:
        return f" ({EXIT_WORDS[fact.value]})"
    if fact.field == "signal" and fact.value.isdigit() and int(fact.value) in SIGNAL_WORDS:
        return f" ({SIGNAL_WORDS[int(fact.value)]})"
    return ""


def outcome(ending: Ending) -> str:
    """What the ending cost: how many completed steps were lost with it."""
    if ending.cause == "completed":
        return "all of it is committed"
    last, committed = ending.last_step, ending.last_committed_step
    if last is None or last <= committed:
        return f"nothing lost: step {committed} was committed"
    return f"{count(last - committed, 'step')} to do again, from step {committed}"


def count(number: int, noun: str) -> str:
    """1 step, 2 steps, 12,345 instances."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
