"""Submitting attempt m: spec, HEAD, gang, submitted – four steps, each safe to repeat, in this order.

Whoever dies between two of them is continued by the next one who looks: the spec that was created first is everybody's.
"""

from trainer.errors import ConfigurationError, Fenced
from trainer.rundir.documents import Documents
from trainer.rundir.records import AttemptSpec, Head, Submitted
from trainer.rundir.swap import new_op_id


def spec_key(attempt: int) -> str:
    return f"attempts/{attempt}/spec.json"


def submitted_key(attempt: int) -> str:
    return f"attempts/{attempt}/submitted.json"


def adopt_spec(documents: Documents, spec: AttemptSpec) -> AttemptSpec:
    """Step 1. Create attempts/<m>/spec.json; when it exists, the one that is there is returned and counts."""
    return documents.adopt(spec_key(spec.attempt), spec)


def swap_to_attempt(documents: Documents, attempt: int, seen: int | None = None) -> tuple[Head, int]:
    """Step 2. HEAD → attempt m, start 0, the commit kept. Returns HEAD (at m already: unchanged) and its generation.

    `seen` is the generation (0: none) of the HEAD that the decision was made on; with it, a HEAD that moved since is
    left alone. Raises Fenced when HEAD names a later attempt or is no longer at `seen`; ConfigurationError when
    attempt m has no spec.
    """
    while True:
        found = documents.head()
        head, generation = found or (None, 0)
        if head is not None and head.attempt == attempt:
            return head, generation
        if head is not None and head.attempt > attempt:
            raise Fenced(f"run directory {documents.uri}: HEAD names attempt {head.attempt}; attempt {attempt} is over")
        if seen is not None and generation != seen:
            raise Fenced(
                f"run directory {documents.uri}: HEAD moved from generation {seen} to {generation} "
                f"since the decision for attempt {attempt}"
            )
        if documents.read(spec_key(attempt), AttemptSpec) is None:
            raise ConfigurationError(
                f"run directory {documents.uri}: attempt {attempt} has no {spec_key(attempt)}; "
                "create it before HEAD names the attempt"
            )
        new = Head(attempt=attempt, start=0, commit=head.commit if head else None, op_id=new_op_id())
        won = documents.swap_head(new, generation)
        if won is not None:
            return new, won


def record_submitted(documents: Documents, attempt: int, submitted: Submitted) -> Submitted:
    """Step 4. Create attempts/<m>/submitted.json; when it exists, the one that is there is returned."""
    return documents.adopt(submitted_key(attempt), submitted)
