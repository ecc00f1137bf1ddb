"""Where commands write: what the file system refuses is one error naming the place, nothing half-written stays, one at a time."""

import contextlib
import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.goldens import TRANSFORMERS
from trainer import convert
from trainer.errors import ConfigurationError, StorageUnavailable
from trainer.evaluate_command import Kept
from trainer.metrics.commands import metrics
from trainer.places import alone, check_writable, written


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def converted(to: str) -> Callable[[Path], Any]:
    return lambda place: convert.run(str(TRANSFORMERS / "mha"), str(place), to, None, None, ())


def kept(place: Path) -> None:
    Kept.open(str(place), {}).add("part", {"text": "x" * 1000})


def overlaid(place: Path) -> None:
    curve = place.parent.parent / "curve.csv"
    curve.write_text("step,train/CE loss\n1,2\n2,1\n")
    arguments = ["overlay", str(curve), str(curve), "--plot", str(place)]
    result = CliRunner().invoke(metrics, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception


WRITERS = {
    "hf": converted("hf"),
    "olmo-core": converted("olmo-core"),
    "untildone": converted("untildone"),
    "results.json": kept,
    "overlay.png": overlaid,
}


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Files end after `limit` bytes: a write fails as on a full disk, without a name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", WRITERS)
def test_a_place_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigurationError, match=rf"file/{name}: .*; choose a place you may write to"):
        WRITERS[name](tmp_path / "file" / name)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["hf", "olmo-core", "results.json", "overlay.png"])
def test_a_full_disk(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    with full_disk(600), pytest.raises(StorageUnavailable, match=rf"full/{name}: .*; free space"):
        WRITERS[name](folder / name)
    assert not [left for left in listed(folder) if left != "overlay.png"]


def test_whose_error_it_is() -> None:
    with (
        pytest.raises(StorageUnavailable, match=r"--out a: No space left on device \(while writing\)"),
        written("--out a"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(ConfigurationError, match=r"--out a: Permission denied \(a/b\)"), written("--out a"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "a/b")
    with pytest.raises(StorageUnavailable, match="--out a: No space left"), written("--out a"):
        raise ValueError("RESOURCE_EXHAUSTED: Error opening zarr driver")
    with pytest.raises(ValueError, match="mine"), written("--out a"):
        raise ValueError("mine")


def test_a_probe_leaves_nothing_and_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    check_writable("--out", tmp_path / "a")
    assert listed(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "mine"
    with pytest.raises(ConfigurationError, match="is a folder"):
        check_writable("--out", tmp_path)


def test_one_at_a_time(tmp_path: Path) -> None:
    with alone(tmp_path / "a"):
        with pytest.raises(ConfigurationError, match="another process is writing it"), alone(tmp_path / "a"):
            pass
        with alone(tmp_path / "b"):
            pass
    with alone(tmp_path / "a"):
        pass
    assert listed(tmp_path) == []


def test_a_second_conversion_does_not_touch_what_the_first_has_written(tmp_path: Path) -> None:
    growing = tmp_path / "hf.incomplete"
    growing.mkdir()
    (growing / "model.safetensors").write_text("half")
    with alone(tmp_path / "hf"), pytest.raises(ConfigurationError, match="another process is writing it"):
        converted("hf")(tmp_path / "hf")
    assert (growing / "model.safetensors").read_text() == "half"
    (tmp_path / "hf.incomplete.orbax-checkpoint-tmp-1").mkdir()
    converted("hf")(tmp_path / "hf")  # that one was killed: its remains go
    assert listed(tmp_path) == ["hf"]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "olmo3"
