"""`untildone verify`: what can be proven about a run from its run directory, one line per proof.

The records are checked here; what needs the data order (which instance was read how often, whether steps done again came out
the same) is asked of `python -m trainer data audit`, in a process of its own: the orchestrator never imports JAX or numpy.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator import trainer_process
from orchestrator.report.collect import RunHistory, collect
from trainer.errors import ConfigurationError, Damaged, TrainerError, TruthUnknown
from trainer.rundir.records import CommitRecord
from trainer.rundir.rundir import RunDirectory


@dataclass(frozen=True)
class Check:
    """One proof: what was checked, how it came out, and the figures."""

    name: str
    passed: bool
    text: str


@dataclass(frozen=True)
class Verdict:
    """All proofs of one run. `figures` are the audit's numbers, by the names of summary.json."""

    checks: tuple[Check, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def verify(
    rundir: RunDirectory, against: RunDirectory | None = None, unfinished: bool = False
) -> tuple[Verdict, RunHistory | None]:
    """Check everything about the run in `store`; with `against`, also that both are the same run as far as they must be.

    `unfinished` accepts a run whose target is not committed yet. Raises StorageUnavailable: an unread object is no failed proof.
    """
    try:
        history = collect(rundir)
    except (ConfigurationError, Damaged, TruthUnknown) as error:
        return Verdict((Check("records", False, str(error)),)), None
    checks = [
        check_target(history, unfinished),
        check_lineage(history),
        check_fingerprints(history),
        check_starts(history),
        check_ledger(history),
        check_checkpoints(history, rundir),
    ]
    audited = audit(rundir.uri, against.uri if against else None)
    found, figures = read_audit(audited, history)
    checks += found
    if against:
        checks += check_reference(history, collect(against))
    return Verdict(tuple(checks), figures), history


def check_target(run: RunHistory, unfinished: bool) -> Check:
    """Done means a committed checkpoint at the target step, and nothing else."""
    text = f"HEAD reaches committed step {run.committed_step:,} of {run.target_step:,}"
    return Check("target", run.done or unfinished, text if run.done else text + ", not done yet")


def check_lineage(run: RunHistory) -> Check:
    """Each commit names its parent, each parent exists, and the step logs cover every step exactly once."""
    problems = []
    for before, after in zip(run.lineage, run.lineage[1:], strict=False):
        if after.parent != before.ref:
            problems.append(f"{after.ref} names {after.parent} as its parent, not {before.ref}")
    first = 0
    for commit in run.lineage:
        steps = [s for piece in commit.step_log for s in range(piece.first, min(piece.last, commit.ref.step) + 1)]
        expected = range(_parent_step(commit, first) + 1, commit.ref.step + 1)
        if sorted(steps) != list(expected):
            problems.append(
                f"{commit.ref}: its step log has {len(steps)} lines, not steps {expected.start}–{expected.stop - 1}"
            )
        if not commit.digest:
            problems.append(f"{commit.ref} has no state digest")
    text = f"{len(run.lineage):,} commits, each with its parent, a state digest and a log of its steps"
    return Check("lineage", not problems, _or_problems(text, problems))


def _parent_step(commit: CommitRecord, otherwise: int) -> int:
    return commit.parent.step if commit.parent else otherwise


def check_fingerprints(run: RunHistory) -> Check:
    """One recipe from the first start to the last commit."""
    wanted = run.recipe.fingerprint()
    wrong = [str(c.ref) for c in run.lineage if c.fingerprint != wanted]
    wrong += [f"start {s.name}" for s in run.starts if s.record.fingerprint != wanted]
    text = f"recipe {wanted[:12]} in {len(run.lineage):,} commits and {len(run.starts):,} starts"
    return Check("fingerprint", not wrong, _or_problems(text, [f"another recipe in {name}" for name in wrong]))


def check_starts(run: RunHistory) -> Check:
    """Commits come from starts that had claimed, in the order of the claims, each on top of what it restored."""
    known = {(s.record.attempt, s.record.start): s for s in run.starts}
    problems, last, seen = [], (0, 0), set[tuple[int, int]]()
    for commit in run.lineage:
        key = (commit.ref.attempt, commit.ref.start)
        if key not in known:
            problems.append(f"{commit.ref} is from a start that never claimed")
        elif key not in seen and known[key].restored != commit.parent:
            problems.append(f"start {key[0]}.{key[1]} restored {known[key].restored} but committed on {commit.parent}")
        if key < last:
            problems.append(f"{commit.ref} comes after a commit of start {last[0]}.{last[1]}")
        last = max(last, key)
        seen.add(key)
    if run.lineage and last > (run.head.attempt, run.head.start):
        problems.append(f"HEAD is at start {run.head.attempt}.{run.head.start}, before the newest commit's")
    text = f"{len(seen)} of {len(run.starts)} starts committed, in order, each on what it restored"
    aside = [str(note.commit) for start in run.starts for note in start.set_aside]
    if aside:
        text += f"; set aside as damaged: {', '.join(aside[:3])}" + (" …" if len(aside) > 3 else "")
    return Check("fence", not problems, _or_problems(text, problems))


def check_ledger(run: RunHistory) -> Check:
    """Every claimed start has exactly one ending, or is the one that HEAD names; no ending is written twice.

    Starts that no orchestrator submitted may lack theirs: nobody was there to write it.
    """
    problems = []
    per_start = Counter((e.attempt, e.start) for e in run.endings if e.start is not None)
    current = (run.head.attempt, run.head.start)
    for start in run.starts:
        key = (start.record.attempt, start.record.start)
        if per_start[key] == 0 and key != current and not run.specs[start.record.attempt].submitted_by:
            problems.append(f"start {start.name} has no ending")
        if per_start[key] > 1:
            problems.append(f"start {start.name} has {per_start[key]} endings")
    problems += [
        f"ending key {key} stands {n} times" for key, n in Counter(e.key for e in run.endings).items() if n > 1
    ]
    causes = Counter(e.cause for e in run.endings)
    counted = ", ".join(f"{n} {cause}" for cause, n in sorted(causes.items()))
    text = f"{len(run.endings)} endings for {len(run.starts)} starts{': ' if counted else ''}{counted}"
    return Check("ledger", not problems, _or_problems(text, problems))


def check_checkpoints(run: RunHistory, rundir: RunDirectory) -> Check:
    """The files of each commit that is still kept are, byte for byte, what was committed; HEAD's must be kept."""
    problems, kept, size = [], 0, 0
    for commit in run.lineage:
        if commit.ref != run.head.commit and not rundir.store.list(commit.checkpoint):
            continue  # collected, as the retention policy asked
        kept += 1
        size += sum(entry.bytes for entry in commit.files)
        problems += [f"{commit.ref}: {problem}" for problem in rundir.damaged_files(commit)]
    text = f"{kept} kept checkpoints, {size / 2**20:.1f} MiB, every file with the checksum it was committed with"
    return Check("checkpoints", not problems, _or_problems(text, problems))


def check_reference(run: RunHistory, other: RunHistory) -> list[Check]:
    """Bit-equality with another run of the same recipe, as far as the recipe's reduction promises it."""
    from orchestrator.report.summary import agreement

    same = agreement(run, other)
    limit = min(s for s in (run.first_reordered_step, run.committed_step, other.committed_step) if s is not None)
    steps = [s for s in same.compared_commits if s <= limit]
    digests = Check(
        "digests",
        bool(steps) and same.digest_equal_until >= max(steps),
        f"{len(steps)} state digests equal to the reference's, through step {same.digest_equal_until:,}"
        + (f"; the first that differs is at step {same.first_unequal_digest:,}" if same.first_unequal_digest else ""),
    )
    losses = Check(
        "losses",
        same.loss_equal_until >= limit,
        f"loss and gradient norm bit-equal to the reference's through step {same.loss_equal_until:,} (needed: {limit:,})",
    )
    last = min(run.committed_step, other.committed_step)
    batches = Check(
        "batches",
        same.instances_equal_until >= last,
        f"the same instances in the same order as the reference in each of {same.instances_equal_until:,} steps (needed: {last:,})",
    )
    return [digests, losses, batches]


def audit(uri: str, against: str | None) -> dict[str, Any]:
    """The JSON of `python -m trainer data audit URI`. Raises StorageUnavailable or ConfigurationError with its one-line message."""
    done = trainer_process.call("data", "audit", uri, "--json", *(("--against", against) if against else ()))
    try:
        body = json.loads(done.stdout)
    except ValueError:
        raise trainer_process.failure(done) from None
    if not isinstance(body, dict):
        raise TrainerError("trainer data audit wrote no JSON object")
    return body


def read_audit(body: Mapping[str, Any], run: RunHistory) -> tuple[list[Check], dict[str, Any]]:
    """The proofs that rest on the audit's JSON, and its figures."""
    repeated, missed, steps = body["repeated_instances"], body["missed_instances"], body["steps"]
    redone, compared, equal = (body[f"redone_steps{kind}"] for kind in ("", "_compared", "_bitwise_equal"))
    problems = [f"{problem['where']}: {problem['text']}" for problem in body["problems"]]
    coverage = Check(
        "coverage",
        # The audit read HEAD a moment later: a run that trains may have committed meanwhile.
        repeated == 0 and missed == 0 and body["last_step"] >= run.committed_step,
        f"{body['read_instances']:,} instances in {steps:,} steps of {body['global_batch']:,}:"
        f" {repeated:,} repeated, {missed:,} missed",
    )
    unequal, unread = body["token_steps_unequal"], body["tokens_unread"]
    text = f"the ids that reached the devices are the order's ({body['order']}) in each of {steps:,} steps"
    if unread:
        text += f"; tokens were not compared with the corpus: {unread}"
    others = body["problem_count"] - unequal
    order = Check("order", not others, _or_problems(text, problems if others else []))
    text = f"read again from the corpus for {body['token_steps_compared']:,} of {steps:,} steps: equal to what the devices got"
    tokens = Check("tokens", unequal == 0, _or_problems(text, problems if unequal else []))
    again = Check(
        "redone",
        compared == equal,
        f"{redone:,} steps were computed again after an interruption; {equal:,} of the {compared:,} on an equal plan are bit-equal",
    )
    names = ("read_instances", "repeated_instances", "missed_instances", "redone_steps", "redone_steps_compared")
    return [coverage, order, *([] if unread else [tokens]), again], {
        name: body[name] for name in (*names, "redone_steps_bitwise_equal")
    }


def _or_problems(text: str, problems: list[str]) -> str:
    """`text`, or the first three problems in its place."""
    if not problems:
        return text
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more
