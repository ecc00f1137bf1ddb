"""The report: figures that can be computed by hand from the made-up run, and a page that needs nothing but itself."""

import itertools
import json
import re
from pathlib import Path

import pytest

from orchestrator.registry import RunNotFound
from orchestrator.report.collect import RunHistory, collect
from orchestrator.report.page import headline
from orchestrator.report.plots import segments
from orchestrator.report.summary import agreement, summary
from orchestrator.report.words import evidence_lines, outcome
from orchestrator.report.write import write_files
from orchestrator.verify import Check, Verdict
from tests.support.synthetic_run import REFERENCE, STORY, DictStore, write
from trainer.errors import Damaged, TruthUnknown
from trainer.rundir.rundir import RunDirectory

FIGURES = {"repeated_instances": 0, "missed_instances": 0, "redone_steps": 15, "redone_steps_bitwise_equal": 15}
PROVEN = Verdict((Check("target", True, "reached"),), FIGURES)


def history(store: DictStore) -> RunHistory:
    return collect(RunDirectory(store))


@pytest.fixture(scope="module")
def run() -> RunHistory:
    return history(write())


@pytest.fixture(scope="module")
def reference() -> RunHistory:
    return history(write(REFERENCE, uri="memory://reference"))


def test_history_follows_the_lineage_and_keeps_what_was_lost(run: RunHistory) -> None:
    assert run.name == "demo"
    assert [start.name for start in run.starts] == ["1.1", "1.2", "1.3", "1.4", "1.5", "2.1", "3.1"]
    assert sorted(run.curve) == list(range(1, 57))
    assert [commit.ref.step for commit in run.lineage] == [8, 11, 16, 24, 32, 40, 41, 48, 49, 56]
    assert (run.starts[2].first_step, run.starts[2].last_step) == (16, 24)  # logged, never committed
    assert not run.starts[2].commits
    assert run.done
    assert run.first_resize_step == 41


def test_summary_has_every_figure_that_was_asked_for(run: RunHistory, reference: RunHistory) -> None:
    body = summary(run, PROVEN, reference)
    assert len(body["endings"]) == 7
    assert len(body["causes"]) == 5
    assert body["endings"][5] == {
        "attempt": 2,
        "start": 1,
        "cause": "plan-change",
        "device_type": "cpu-2",
        "micro_batch": 16,
        "accumulation": 16,
        "first_step": 41,
        "last_committed_step": 49,
    }
    assert {k: body[k] for k in FIGURES} == FIGURES
    assert (body["global_batch"], body["done_step"], body["target_step"]) == (512, 56, 56)
    assert body["digest_equal_reference_until_step"] == body["first_resize_step"] == 41
    assert (body["reduction"], body["ends_as_reference"]) == ("fast", False)
    assert body["seconds"] == pytest.approx(120.5)  # the sum of all the phases of the story
    assert json.loads(json.dumps(body)) == body


def test_agreement_stops_at_the_first_bit_that_differs(run: RunHistory, reference: RunHistory) -> None:
    same = agreement(run, reference)
    assert (same.digest_equal_until, same.first_unequal_digest) == (41, 48)
    assert (same.loss_equal_until, same.first_unequal_loss) == (41, 42)
    assert same.instances_equal_until == 56


def test_a_run_that_ends_as_the_reference_says_so() -> None:
    kept = history(write(reduction="invariant", keeps_bits=True))
    body = summary(kept, PROVEN, history(write(REFERENCE, reduction="invariant")))
    assert (body["reduction"], body["ends_as_reference"], body["digest_equal_reference_until_step"]) == (
        "invariant",
        True,
        56,
    )
    assert (
        "through step 56: the same parameters and moments, though the number of devices changed at step 41"
        in headline(kept, PROVEN, body)
    )


def test_a_run_agrees_with_itself_to_the_end(run: RunHistory) -> None:
    same = agreement(run, run)
    assert (same.digest_equal_until, same.first_unequal_digest, same.loss_equal_until) == (56, None, 56)


def test_the_page_needs_no_network(run: RunHistory, reference: RunHistory, tmp_path: Path) -> None:
    report = write_files(run, reference, PROVEN, tmp_path)
    html = report.html.read_text()
    outside = [a for a in re.findall(r'(?:src|srcset|href)="([^"]{0,40})', html) if not a.startswith("data:image/png")]
    assert outside == []
    assert "<script" not in html
    assert "url(" not in html
    for name in ("loss.png", "timeline.png", "coverage.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "summary.json").read_text())["done_step"] == 56


def test_the_page_shows_each_start_with_cause_evidence_and_plan(
    run: RunHistory, reference: RunHistory, tmp_path: Path
) -> None:
    html = write_files(run, reference, PROVEN, tmp_path).html.read_text()
    for start, life in zip(run.starts, STORY, strict=True):
        assert f">{start.name}<" in html
        assert life.cause in html
    assert "micro-batch 16<br>× accumulation 16" in html
    assert "signal = 9 (SIGKILL, killed at once without a chance to save)" in html


def test_text_from_records_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    store = write()
    key = "attempts/1/endings/1.json"
    body = json.loads(store.objects[key])
    body["evidence"][0]["value"] = "<img src=x onerror=alert(1)>"
    store.objects[key] = json.dumps(body).encode()
    html = write_files(history(store), None, PROVEN, tmp_path).html.read_text()
    assert "<img src=x" not in html
    assert "&lt;img src=x" in html


def test_a_run_that_is_still_going_can_be_reported(tmp_path: Path) -> None:
    going = history(write(STORY[:4], done=False))
    report = write_files(going, None, Verdict(()), tmp_path)
    assert not going.done
    assert report.summary["digest_equal_reference_until_step"] is None
    assert "no ending yet" in report.html.read_text()


def test_headline_says_what_is_not_proven(run: RunHistory, reference: RunHistory) -> None:
    failed = Verdict((Check("ledger", False, "start 1.2 has no ending"),), FIGURES)
    text = headline(run, failed, summary(run, failed, reference))
    assert text.endswith("NOT PROVEN: ledger.")
    good = headline(run, PROVEN, summary(run, PROVEN, reference))
    assert good.startswith("Done at step 56 after 6 interruptions by 4 causes.")
    assert "through step 41, where the number of devices first changed" in good


def test_timeline_segments_follow_each_other_without_gaps(run: RunHistory) -> None:
    for start in run.starts:
        parts = segments(start)
        assert parts[0][0] == "queue"
        for (_, left, width), (_, following, _) in itertools.pairwise(parts):
            assert left + width == pytest.approx(following, abs=1e-9)
        assert sum(width for *_, width in parts) == pytest.approx(sum(start.phase_seconds.values()))


def test_words_translate_codes_and_count_lost_steps(run: RunHistory) -> None:
    preempted, killed = run.endings[0], run.endings[1]
    assert evidence_lines(preempted)[1] == "pod demo-a1-0: exit code = 75 (preempted, saw SIGTERM and left in order)"
    assert outcome(preempted) == "nothing lost: step 11 was committed"
    assert outcome(killed) == "4 steps to do again, from step 16"


def test_a_damaged_step_log_is_named(run: RunHistory) -> None:
    store = write()
    store.objects["steps/1.1/1-8.jsonl"] = store.objects["steps/1.1/1-8.jsonl"].replace(b'"lr":0.001', b'"lr":0.002')
    with pytest.raises(Damaged, match=r"steps/1\.1/1-8\.jsonl"):
        history(store)


def test_a_missing_parent_is_truth_unknown() -> None:
    store = write()
    del store.objects["commits/1.4/24.json"]
    with pytest.raises(TruthUnknown, match=r"commits/1\.4/24\.json"):
        history(store)


def test_an_empty_folder_is_no_run() -> None:
    with pytest.raises(RunNotFound, match="no run was ever submitted"):
        history(DictStore())
