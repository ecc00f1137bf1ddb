"""A start restores the commit in its claim: neither the newest folder, nor the newest record, is a commit for that."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import runs
from trainer.departure import Departure
from trainer.distributed import Gang
from trainer.environment import GangEnvironment
from trainer.errors import Fenced
from trainer.rundir.disk import DiskStore
from trainer.rundir.rundir import RunDirectory
from trainer.train import Process


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

    environment = GangEnvironment(str(tmp_path), 1, "nonce", "pod", 0, 0, 1, "127.0.0.1:1")
    again = RunDirectory(DiskStore(tmp_path), patience_seconds=0)
    claim, record = Process(environment, Departure(), 0.0)._claim(again, Gang(0, 1, None, 1.0))
    assert claim is not None
    assert claim.start == 3
    assert (record.ref.step if record else None) == committed
