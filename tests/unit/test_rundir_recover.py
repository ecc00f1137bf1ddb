"""A lost HEAD is rebuilt from the records, by a person's decision."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.commands.recover import recover_command
from tests.support import runs
from trainer.errors import TruthUnknown
from trainer.rundir import recover
from trainer.rundir.disk import DiskStore
from trainer.rundir.rundir import RunDirectory


@pytest.fixture
def disk(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path)


def trained(disk: DiskStore) -> RunDirectory:
    """Attempt 1 committed 2 and 4; attempt 2 set 4 aside and committed 5 and 6."""
    directory = runs.begun(disk)
    first = runs.claim(directory)
    runs.commit(first, 2)
    runs.commit(first, 4)
    runs.submit(directory, 2)
    second = runs.claim(directory, attempt=2)
    second.set_aside("damaged")
    runs.commit(second, 5)
    runs.commit(second, 6)
    return directory


@pytest.mark.parametrize("damage", ["missing", "unreadable"])
def test_the_same_head_comes_back(disk: DiskStore, damage: str) -> None:
    directory = trained(disk)
    found = directory.head()
    assert found
    if damage == "missing":
        shutil.rmtree(disk.root / "HEAD.d")
    else:
        disk.swap("HEAD", b"{", found[1])
    with pytest.raises(TruthUnknown, match="untildone recover"):
        directory.head()
    recover.write(directory, recover.propose(directory))
    again = directory.head(at_least=2)
    assert again
    assert (again[0].attempt, again[0].commit) == (2, found[0].commit)
    runs.submit(directory, 3)
    claim = runs.claim(directory, attempt=3)
    runs.commit(claim, 9)
    assert [ref.step for ref in runs.committed(directory)] == [2, 5, 6, 9]


def test_a_commit_that_is_not_whole_is_passed_over(disk: DiskStore) -> None:
    directory = trained(disk)
    disk.delete_tree("checkpoints/2.1/6")
    newest = recover.propose(directory).commit
    assert newest
    assert newest.step == 5
    (disk.root / "commits/2.1/5.json").unlink()
    newest = recover.propose(directory).commit
    assert newest
    assert (newest.attempt, newest.step) == (1, 2), "4 was set aside"


def test_an_attempt_known_elsewhere_counts(disk: DiskStore) -> None:
    directory = trained(disk)
    assert recover.propose(directory, at_least=7).attempt == 7


def test_nothing_to_recover_from(disk: DiskStore) -> None:
    with pytest.raises(TruthUnknown, match="no attempt and no commit"):
        recover.propose(RunDirectory(disk))


def test_the_command_shows_first_and_writes_when_told(disk: DiskStore) -> None:
    runner = CliRunner()
    trained(disk)
    untouched = runner.invoke(recover_command, [disk.uri, "--yes"], standalone_mode=False)
    assert "HEAD is fine" in untouched.output
    shutil.rmtree(disk.root / "HEAD.d")
    shown = runner.invoke(recover_command, [disk.uri], standalone_mode=False)
    assert "would write HEAD: attempt 2, start 1, commit: step 6 of start 2.1" in shown.output
    assert not (disk.root / "HEAD.d").exists()
    written = runner.invoke(recover_command, [disk.uri, "--yes"], standalone_mode=False)
    assert written.output == "HEAD was written: attempt 2, start 1, commit: step 6 of start 2.1\n"
    found = RunDirectory(disk).head(at_least=2)
    assert found
    assert found[0].commit
    assert found[0].commit.step == 6
    rolled_back = runner.invoke(recover_command, [disk.uri, "--attempt", "5"], standalone_mode=False)
    assert "would write HEAD: attempt 5, start 0" in rolled_back.output
