"""Freezing: sizes become part of the recipe, and every file that cannot be right is named before anything runs."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.corpus import frozen, recipe, write
from trainer.data_root import GcsRoot
from trainer.errors import ConfigurationError, StorageUnavailable
from trainer.freezing import check_files, freeze


def test_sizes_are_measured_and_decide_the_fingerprint(tmp_path: Path) -> None:
    made = frozen(tmp_path)
    assert [f.bytes for f in made.data.files] == [2000, 1554, 8200]
    assert [f.bytes for f in made.data.held_out] == [400]
    assert made.instances == 1000 // 16 + 777 // 16 + 4100 // 16
    assert freeze(made, str(tmp_path)) == made
    write(tmp_path, (1001,))
    again = freeze(recipe(bytes_per_file=(None,) * 3, held_out=("h.bin",)), str(tmp_path))
    assert again.fingerprint() != made.fingerprint()


def refused(folder: Path, match: str, **options: Any) -> str:
    with pytest.raises(ConfigurationError, match=match) as caught:
        freeze(recipe(**options), str(folder))
    return str(caught.value)


def test_a_missing_root(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere does not exist; set data.root")
    (tmp_path / "file").write_bytes(b"x")
    refused(tmp_path / "file", "is a file, not a folder")
    with pytest.raises(ConfigurationError, match="unknown scheme"):
        freeze(recipe(), "s3://bucket")


def test_every_bad_file_is_named_at_once(tmp_path: Path) -> None:
    write(tmp_path, (1000,))
    (tmp_path / "f1.bin").write_bytes(b"")
    (tmp_path / "f2.bin").write_bytes(b"odd")
    (tmp_path / "f3.bin").write_bytes(bytes(2 * 15))
    (tmp_path / "f5.bin").mkdir()
    text = refused(tmp_path, "f1.bin is empty", bytes_per_file=(None,) * 6, held_out=("h.bin",))
    assert "f0.bin" not in text
    assert "f2.bin is truncated or of another dtype: 3 bytes" in text
    assert "f3.bin is smaller than one instance: 15 tokens, sequence_length is 16" in text
    assert "f4.bin is missing" in text
    assert "f5.bin is not a regular file" in text
    assert "h.bin is missing" in text


def test_a_thousand_missing_files_make_a_readable_error(tmp_path: Path) -> None:
    assert "and 980 more" in refused(tmp_path, "f0.bin is missing", bytes_per_file=(None,) * 1000)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an ordinary user meets it: to root, as whom tests may run, nothing is unreadable."""
    write(tmp_path, (1000,))
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused(tmp_path, "f0.bin may not be read by this user")


def test_a_batch_larger_than_the_corpus(tmp_path: Path) -> None:
    write(tmp_path, (16 * 7,))
    refused(tmp_path, "global_batch 8 is larger than the corpus: 1 files .* hold 7 instances")


@pytest.mark.parametrize(("count", "word"), [(900, "truncated"), (1100, "changed")])
def test_a_file_of_another_size_than_frozen(tmp_path: Path, count: int, word: str) -> None:
    made = frozen(tmp_path)
    write(tmp_path, (count,))
    with pytest.raises(
        ConfigurationError, match=f"f0.bin has {2 * count} bytes, but the frozen recipe says 2000: it was {word}"
    ):
        freeze(made, str(tmp_path))


def test_checking_needs_a_frozen_recipe(tmp_path: Path) -> None:
    from trainer.data_root import open_root

    with pytest.raises(ConfigurationError, match="freeze the recipe first"):
        check_files(recipe(), recipe().data.files, open_root(str(tmp_path)))


def test_freezing_needs_neither_numpy_nor_jax() -> None:
    """The orchestrator freezes recipes, and starts without either."""
    import subprocess

    code = "import sys, trainer.freezing; print([m for m in ('jax', 'numpy', 'grain') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- gs:// with a client of our own; no network


class FakeBlob:
    def __init__(self, content: bytes, faults: list[Exception]) -> None:
        self._content, self._faults, self.size = content, faults, len(content)

    def download_as_bytes(self, start: int, end: int, retry: None) -> bytes:
        if self._faults:
            raise self._faults.pop(0)
        return self._content[start : end + 1]


class FakeClient:
    """Client, and its own bucket."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects, self.faults = objects, list[Exception]()

    def bucket(self, name: str) -> "FakeClient":
        assert name == "bucket"
        return self

    def get_blob(self, name: str) -> FakeBlob | None:
        if self.faults:
            raise self.faults.pop(0)
        return FakeBlob(self.objects[name], []) if name in self.objects else None

    def blob(self, name: str) -> FakeBlob:
        return FakeBlob(self.objects[name], self.faults)


def test_a_bucket_is_read_by_range_and_repeats_what_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    api = pytest.importorskip("google.api_core.exceptions")
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    client = FakeClient({"mix/f0.bin": bytes(range(100))})
    root = GcsRoot("gs://bucket/mix/", client)
    client.faults = [api.ServiceUnavailable("later"), ConnectionError("cut")]
    assert root.size("f0.bin") == 100
    buffer = bytearray(10)
    client.faults = [api.TooManyRequests("slow down"), TimeoutError()]
    root.read_into("f0.bin", 20, memoryview(buffer))
    assert bytes(buffer) == bytes(range(20, 30))
    with pytest.raises(ConfigurationError, match=r"f0.bin below gs://bucket/mix/ ends before byte 105"):
        root.read_into("f0.bin", 95, memoryview(bytearray(10)))
    with pytest.raises(ConfigurationError, match=r"f1.bin is missing"):
        root.size("f1.bin")
    client.faults = [api.Forbidden("no")]
    with pytest.raises(ConfigurationError, match="may not be read"):
        root.read_into("f0.bin", 0, memoryview(buffer))


def test_a_bucket_that_never_answers_is_unknown_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    api = pytest.importorskip("google.api_core.exceptions")
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    monkeypatch.setattr("trainer.data_root.GCS_RETRY_SECONDS", 0)
    client = FakeClient({"f0.bin": bytes(100)})
    client.faults = [api.ServiceUnavailable("down")] * 3
    with pytest.raises(StorageUnavailable, match="down"):
        GcsRoot("gs://bucket", client).size("f0.bin")
