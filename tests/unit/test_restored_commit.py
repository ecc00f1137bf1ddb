"""A process and its claim: it restores that claim's commit, whatever else lies about; no claim after SIGTERM."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import runs
from trainer.beginning import pin
from trainer.departure import Departure, End
from trainer.distributed import Gang
from trainer.environment import GangEnvironment
from trainer.errors import ExitCode, Fenced
from trainer.rundir.claims import ClaimStopped
from trainer.rundir.disk import DiskStore
from trainer.rundir.records import CommitRef, InitRecord
from trainer.rundir.rundir import RunDirectory
from trainer.settings import InitFrom
from trainer.train import Process


def a_process(folder: Path) -> Process:
    return Process(GangEnvironment(str(folder), 1, "nonce", "pod", 0, 0, 1, "127.0.0.1:1"), Departure(), 0.0)


@pytest.mark.parametrize("committed", [None, 2])
def test_what_no_head_ever_reached_is_not_restored(
    committed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fenced start left a whole checkpoint and its record, further on than HEAD; another left a torn folder."""
    monkeypatch.setattr("trainer.train.Termination", lambda terminated: SimpleNamespace(seen=False))
    rundir = runs.begun(DiskStore(tmp_path), patience_seconds=0)
    old = runs.claim(rundir)
    if committed is not None:
        runs.commit(old, committed)
    runs.claim(rundir, pod="later")
    with pytest.raises(Fenced):
        runs.commit(old, 9)
    rundir.create_bytes("checkpoints/1.2/12/state", b"torn")
    assert rundir.store.list("commits")[-1] == "commits/1.1/9.json"

    claim, record = a_process(tmp_path)._claim(RunDirectory(DiskStore(tmp_path)), Gang(0, 1, None, 1.0))
    assert claim is not None
    assert claim.start == 3
    assert (record.ref.step if record else None) == committed


def test_a_process_that_has_seen_sigterm_does_not_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the moment before it is gone."""
    monkeypatch.setattr("trainer.train.Termination", lambda terminated: SimpleNamespace(seen=True))
    rundir = runs.begun(DiskStore(tmp_path), patience_seconds=0)
    with pytest.raises(ClaimStopped):
        a_process(tmp_path)._claim(rundir, Gang(0, 1, None, 1.0))
    assert rundir.head()[0].start == 0  # type: ignore[index]


@pytest.mark.parametrize(("code", "flushes"), [(ExitCode.FENCED, 0), (ExitCode.APPLICATION_ERROR, 1)])
def test_a_fenced_process_writes_no_more_steps(
    code: ExitCode, flushes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.train.Termination", lambda terminated: SimpleNamespace(seen=False))
    process, flushed = a_process(tmp_path), list[bool]()
    process.steplog = SimpleNamespace(flush=lambda: flushed.append(True))  # type: ignore[assignment]
    process._flush_log(End(int(code), "a reason"))
    assert len(flushed) == flushes


def test_a_run_that_cannot_be_pinned_may_still_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody else's, which we may not write to: that is said, and ends nothing."""
    source = InitFrom(run=f"{tmp_path}/gone@8")
    pin(InitRecord(source=source, commit=CommitRef(attempt=1, start=1, step=8)), "/runs/child")
    assert "step 8 of start 1.1" in capsys.readouterr().err
    pin(InitRecord(source=None), "/runs/child")
    assert not capsys.readouterr().err
