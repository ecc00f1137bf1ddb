"""A changed image, command or environment: tried at the next commit, and taken back by itself if it fails at once. Pure.

Everything needed is in the spec of HEAD's attempt: what it runs, what to return to while that has not committed
anything, and what was tried and taken back. So any orchestrator continues where another one died.
"""

from dataclasses import dataclass

from orchestrator.observation import Observation
from trainer.rundir.records import Category, Ending, Program

# What a bad image or environment looks like. Of these, the first before the first new commit takes the program back.
FAULTS: frozenset[Category] = frozenset(
    {"application-error", "bad-configuration", "unknown", "hang", "non-finite", "mixed-gang"}
)


@dataclass(frozen=True)
class Programs:
    """The three fields of an AttemptSpec that say what runs."""

    program: Program | None = None
    fallback: Program | None = None
    rejected: str | None = None


def is_new(o: Observation) -> bool:
    """What is asked for is not what HEAD's attempt runs, and was not tried before in vain."""
    spec, wanted = o.spec, o.program
    if spec is None or spec.program is None or wanted is None:
        return False
    return wanted.digest not in (spec.program.digest, spec.rejected)


def failed_at_once(o: Observation) -> Ending | None:
    """The ending by which HEAD's attempt, with a new program, failed before its first commit; None if it did not."""
    if not on_trial(o):
        return None
    mine = (ending for ending in o.endings if ending.attempt == o.attempt)
    return next((ending for ending in mine if ending.cause in FAULTS), None)


def on_trial(o: Observation) -> bool:
    """HEAD's attempt runs a new program that has committed nothing yet, and there is one to return to."""
    return o.spec is not None and o.spec.fallback is not None and not _has_committed(o)


def next_programs(o: Observation) -> Programs:
    """What the attempt after HEAD's runs."""
    spec, wanted = o.spec, o.program
    if wanted is None:
        return Programs()
    if spec is None or spec.program is None:
        return Programs(wanted)
    current = Programs(spec.program, spec.fallback if on_trial(o) else None, spec.rejected)
    if failed_at_once(o):
        current = Programs(spec.fallback, None, spec.program.digest)
    assert current.program is not None
    if wanted.digest in (current.program.digest, current.rejected):
        return current
    return Programs(wanted, current.fallback or current.program)


def _has_committed(o: Observation) -> bool:
    commit = o.head.commit if o.head else None
    return commit is not None and commit.attempt == o.attempt
