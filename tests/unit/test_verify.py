"""`verify` must fail for each thing it claims to prove: every test damages one record and expects one proof to fail."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import verify as v
from orchestrator.report.collect import RunHistory, collect
from tests.support.synthetic_run import REFERENCE, STORY, DictStore, write
from trainer.rundir.records import CommitRef, SetAside
from trainer.rundir.rundir import RunDirectory

PURE: dict[str, Callable[[RunHistory], v.Check]] = {
    "target": lambda run: v.check_target(run, unfinished=False),
    "lineage": v.check_lineage,
    "fingerprint": v.check_fingerprints,
    "fence": v.check_starts,
    "ledger": v.check_ledger,
}


def failing(store: DictStore) -> dict[str, str]:
    """Names of the pure checks that fail for the run in `store`, with their texts."""
    run = collect(RunDirectory(store))
    checks = {name: check(run) for name, check in PURE.items()}
    assert all(check.name == name for name, check in checks.items())
    return {name: check.text for name, check in checks.items() if not check.passed}


def edit(store: DictStore, key: str, **changes: Any) -> DictStore:
    body = json.loads(store.objects[key]) | changes
    store.objects[key] = json.dumps(body).encode()
    return store


def test_a_sound_run_passes() -> None:
    assert failing(write()) == {}


def test_a_run_short_of_its_target_is_not_done() -> None:
    store = write(STORY[:6])
    assert list(failing(store)) == ["target"]
    run = collect(RunDirectory(store))
    assert v.check_target(run, unfinished=True).passed


@pytest.mark.parametrize(
    ("key", "changes", "proof", "text"),
    [
        ("commits/1.4/24.json", {"fingerprint": "0" * 64}, "fingerprint", "step 24 of start 1.4"),
        ("attempts/2/1/start.json", {"fingerprint": "0" * 64}, "fingerprint", "start 2.1"),
        ("commits/1.4/32.json", {"digest": {}}, "lineage", "no state digest"),
        ("commits/1.4/32.json", {"step_log": []}, "lineage", "steps 25–32"),
        (
            "attempts/1/4/start.json",
            {"restored": {"attempt": 1, "start": 1, "step": 11}},
            "fence",
            "start 1.4 restored",
        ),
    ],
)
def test_one_wrong_record_fails_one_proof(key: str, changes: dict[str, Any], proof: str, text: str) -> None:
    found = failing(edit(write(), key, **changes))
    assert list(found) == [proof]
    assert text in found[proof]


def test_a_start_without_an_ending_fails_the_ledger() -> None:
    store = write()
    del store.objects["attempts/2/endings/1.json"]
    assert failing(store) == {"ledger": "start 2.1 has no ending"}


def test_the_live_start_needs_no_ending() -> None:
    assert "ledger" not in failing(write(STORY[:4], done=False))


def test_a_start_without_an_orchestrator_needs_no_ending() -> None:
    store = write()
    del store.objects["attempts/2/endings/1.json"]
    assert failing(edit(store, "attempts/2/spec.json", submitted_by="process 7")) == {}


def test_an_ending_that_is_charged_twice_fails_the_ledger() -> None:
    store = write()
    twice = json.loads(store.objects["attempts/3/endings/1.json"]) | {"index": 2}
    store.objects["attempts/3/endings/2.json"] = json.dumps(twice).encode()
    assert "stands 2 times" in failing(store)["ledger"]


def test_a_commit_of_a_start_that_never_claimed_fails_the_fence() -> None:
    store = write()
    del store.objects["attempts/1/4/start.json"]
    assert "never claimed" in failing(store)["fence"]


def test_a_start_that_set_damaged_commits_aside_goes_on_from_their_parent() -> None:
    store = write()
    start = json.loads(store.objects["attempts/1/4/start.json"])
    whole = CommitRef.model_validate(start["restored"])
    damaged = [CommitRef(attempt=1, start=3, step=whole.step + n) for n in (2, 1)]
    edit(store, "attempts/1/4/start.json", restored=damaged[0].model_dump())
    assert list(failing(store)) == ["fence"]  # nothing says why it did not go on from there
    for commit, parent in zip(damaged, [damaged[1], whole], strict=True):
        note = SetAside(commit=commit, parent=parent, reason="a bit", time=1.0)
        store.objects[f"attempts/1/4/set-aside-{commit.step}.json"] = note.canonical()
    assert failing(store) == {}
    run = collect(RunDirectory(store))
    assert f"set aside as damaged: {damaged[1]}, {damaged[0]}" in v.check_starts(run).text
    (fourth,) = [start for start in run.starts if start.name == "1.4"]
    assert (fourth.restored, fourth.first_step) == (whole, whole.step)


def test_one_flipped_bit_in_a_checkpoint_is_found() -> None:
    store = write()
    key = "checkpoints/3.1/56/arrays"
    store.objects[key] = store.objects[key][:500] + b"y" + store.objects[key][501:]
    rundir = RunDirectory(store)
    check = v.check_checkpoints(collect(rundir), rundir)
    assert not check.passed
    assert "arrays" in check.text


def test_collected_checkpoints_are_fine_but_heads_is_not() -> None:
    store = write()
    store.delete_tree("checkpoints/1.1/8")
    rundir = RunDirectory(store)
    assert v.check_checkpoints(collect(rundir), rundir).passed
    store.delete_tree("checkpoints/3.1/56")
    assert not v.check_checkpoints(collect(rundir), rundir).passed


def test_the_reference_must_agree_until_the_first_resize() -> None:
    run = collect(RunDirectory(write()))
    reference = write(REFERENCE)
    checks = v.check_reference(run, collect(RunDirectory(reference)))
    assert [(c.name, c.passed) for c in checks] == [("digests", True), ("losses", True), ("batches", True)]
    edit(reference, "commits/1.1/24.json", digest={"params/layer0": 1})
    checks = v.check_reference(run, collect(RunDirectory(reference)))
    assert [(c.name, c.passed) for c in checks] == [("digests", False), ("losses", True), ("batches", True)]
    assert "first that differs is at step 24" in checks[0].text


def test_where_the_reduction_is_invariant_the_reference_must_agree_to_the_end() -> None:
    reference = collect(RunDirectory(write(REFERENCE, reduction="invariant")))
    kept = collect(RunDirectory(write(reduction="invariant", keeps_bits=True)))
    assert (kept.first_resize_step, kept.first_reordered_step) == (41, None)
    assert all(check.passed for check in v.check_reference(kept, reference))
    lost = collect(RunDirectory(write(reduction="invariant")))
    checks = v.check_reference(lost, reference)
    assert [(c.name, c.passed) for c in checks] == [("digests", False), ("losses", False), ("batches", True)]


def test_other_instances_than_the_reference_fail() -> None:
    run = collect(RunDirectory(write()))
    other = collect(RunDirectory(write(REFERENCE)))
    swapped = dict(other.curve)
    swapped[50] = swapped[50].model_copy(update={"ids": "f" * 16})
    from dataclasses import replace

    checks = v.check_reference(run, replace(other, curve=swapped))
    assert [(c.name, c.passed) for c in checks] == [("digests", True), ("losses", True), ("batches", False)]


@pytest.mark.parametrize(
    ("changes", "failed", "named"),
    [
        ({}, [], "coverage order tokens redone"),
        ({"token_steps_unequal": 2, "problem_count": 2}, ["tokens"], "coverage order tokens redone"),
        ({"problem_count": 1}, ["order"], "coverage order tokens redone"),
        ({"tokens_unread": "no such folder", "token_steps_compared": 0}, [], "coverage order redone"),
        ({"redone_steps_bitwise_equal": 3}, ["redone"], "coverage order tokens redone"),
        ({"missed_instances": 1}, ["coverage"], "coverage order tokens redone"),
    ],
)
def test_what_the_audit_found_decides_its_proofs(changes: dict[str, Any], failed: list[str], named: str) -> None:
    run = collect(RunDirectory(write()))
    body = {
        "repeated_instances": 0, "missed_instances": 0, "steps": 40, "read_instances": 20480, "global_batch": 512,
        "last_step": run.committed_step, "problem_count": 0, "problems": [{"where": "log", "text": "wrong"}],
        "order": "feistel v1", "redone_steps": 4, "redone_steps_compared": 4, "redone_steps_bitwise_equal": 4,
        "token_steps_compared": 40, "token_steps_unequal": 0, "tokens_unread": "",
    }  # fmt: skip
    checks, _ = v.read_audit(body | changes, run)
    assert [check.name for check in checks if not check.passed] == failed
    assert " ".join(check.name for check in checks) == named
    assert all("no such folder" in c.text for c in checks if c.name == "order" and changes.get("tokens_unread"))
