"""Token files and order tables in a bucket, against a local server of the GCS API."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.golden import inputs
from tests.support.corpus import frozen, plan, recipe, sized
from tests.support.gcs_server import GcsServer
from tests.unit.test_packing import packed_recipe
from trainer.data.examples import write_examples
from trainer.data.held_out import check_held_out
from trainer.data.loader import Loader
from trainer.data.mix import KEPT_BYTES, Mix
from trainer.data.order import BatchOrder, open_order
from trainer.data.order_table import build_table
from trainer.data.packing import write_packed
from trainer.errors import ConfigurationError
from trainer.freezing import freeze
from trainer.recipe import load
from trainer.rundir.rundir import RunDirectory


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        server.create_bucket("tokens")
        yield server


@pytest.fixture
def bucket(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> object:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return storage.Client(project="none", credentials=AnonymousCredentials()).bucket("tokens")


@pytest.mark.parametrize("kept", [0, KEPT_BYTES])
def test_the_same_corpus_below_a_folder_and_in_a_bucket(
    bucket: object, tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read range by range, as a large one is, and whole."""
    monkeypatch.setattr("trainer.data.mix.KEPT_BYTES", kept)
    on_disk = frozen(tmp_path)
    for path in tmp_path.iterdir():
        bucket.blob(f"mix/{path.name}").upload_from_filename(path)  # type: ignore[attr-defined]
    root = "gs://tokens/mix"
    made = freeze(recipe(bytes_per_file=(None,) * 3, held_out=("h.bin",)), root)
    assert made == on_disk
    disk, gcs = Mix(made, str(tmp_path)), Mix(made, root)
    gcs.check()
    ids = np.array([3, 200, 61, 62, 109, 365], np.uint64)
    assert np.array_equal(gcs.instances(ids), disk.instances(ids))
    assert check_held_out(gcs, Mix(made, root, "held_out")) is True
    order, shape = open_order(made), plan(processes=2)
    with Loader(gcs, order, made, shape, 1, 5) as a, Loader(disk, order, made, shape, 1, 5) as b:
        for _ in range(5):
            (t, one), (u, other) = next(a), next(b)
            assert t == u
            assert all(np.array_equal(one[name], other[name]) for name in one)


def test_every_reading_thread_keeps_its_connection(
    bucket: object, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.mix.KEPT_BYTES", 0)
    made = frozen(tmp_path)
    for path in tmp_path.iterdir():
        bucket.blob(f"many/{path.name}").upload_from_filename(path)  # type: ignore[attr-defined]
    mix = Mix(made, "gs://tokens/many")
    for _ in range(5):
        mix.instances(np.arange(0, 366, 3, dtype=np.uint64))
    assert "pool is full" not in caplog.text


def test_what_is_wrong_in_a_bucket_is_named(bucket: object, tmp_path: Path) -> None:
    frozen(tmp_path)
    for name in ("f0.bin", "f1.bin", "h.bin"):
        bucket.blob(f"bad/{name}").upload_from_filename(tmp_path / name)  # type: ignore[attr-defined]
    bucket.blob("bad/f1.bin").upload_from_string(b"")  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"gs://tokens/bad: data file f1\.bin is empty.*f2\.bin is missing"):
        freeze(recipe(bytes_per_file=(None,) * 3, held_out=("h.bin",)), "gs://tokens/bad")
    with pytest.raises(ConfigurationError, match=r"f0\.bin is missing"):
        freeze(recipe(), "gs://no-such-bucket/mix")
    shrunk = freeze(recipe(), "gs://tokens/bad")
    bucket.blob("bad/f0.bin").upload_from_string(bytes(100))  # type: ignore[attr-defined]
    for instance in (3, 10):
        with pytest.raises(ConfigurationError, match=r"f0\.bin .* ends before byte"):
            Mix(shrunk, "gs://tokens/bad").instance(instance)


def test_an_order_table_in_a_bucket(bucket: object) -> None:
    made = sized(1000, kind="olmo_core")
    store = RunDirectory.open("gs://tokens/run", create=True).store
    key, written = build_table(store, made, 0)
    assert written
    assert build_table(store, made, 0) == (key, False)
    assert np.array_equal(BatchOrder(made, store, in_memory=0).block(0, 125), open_order(made).block(0, 125))


def test_examples_and_packed_documents_in_a_bucket(bucket: object, tmp_path: Path) -> None:
    """The same bytes as on disk; packed files that are there already are left alone."""
    (tmp_path / "mix").mkdir()
    inputs.write_mix(tmp_path / "mix")
    made = packed_recipe()
    for path in (tmp_path / "mix").iterdir():
        bucket.blob(f"pack/{path.name}").upload_from_filename(path)  # type: ignore[attr-defined]
    on_disk = list(write_packed(made, str(tmp_path / "mix"), str(tmp_path / "mix")))
    assert list(write_packed(made, "gs://tokens/pack", "gs://tokens/pack")) == on_disk
    written = {path: bucket.get_blob(f"pack/{path}").generation for path in ("packed/000.npy", "packed/002.npy.json")}  # type: ignore[attr-defined]
    list(write_packed(made, "gs://tokens/pack", "gs://tokens/pack"))
    for file in made.data.files:
        blob = bucket.get_blob(f"pack/{file.path}")  # type: ignore[attr-defined]
        assert blob.download_as_bytes() == (tmp_path / "mix" / file.path).read_bytes()
    assert {path: bucket.get_blob(f"pack/{path}").generation for path in written} == written  # type: ignore[attr-defined]

    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "a", "response": "b"}\n')
    small = load("sft", {"data.eos_id": 256, "sequence_length": 32, "global_batch": 1})
    write_examples(small, [str(chats)], str(tmp_path / "sft"))
    write_examples(small, [str(chats)], "gs://tokens/sft")
    there = bucket.blob("sft/sft/examples.npy").download_as_bytes()  # type: ignore[attr-defined]
    assert there == (tmp_path / "sft" / "sft" / "examples.npy").read_bytes()
