"""Weights between real runs and other formats: out of a commit, into a run, from disk and from a bucket."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.gang import ROOT, Run, small_recipe
from tests.support.gcs_server import GcsServer
from tests.support.goldens import TRANSFORMERS, assert_same, streamed, whole
from trainer.digest import state_digest_numpy
from trainer.errors import ConfigurationError
from trainer.weights.sources import open_hugging_face, open_source


def convert(*arguments: object, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "convert", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if expect == 0 else done.stderr


def test_a_commit_becomes_hugging_face_s_and_begins_another_run(new_run: Callable[..., Run], tmp_path: Path) -> None:
    """Two processes with two devices each wrote the commit, so that every matrix lies there in four pieces."""
    parent, child = new_run("parent"), new_run("child")
    parent.train("cpu-4", 8)
    assert convert(f"{parent.folder}@4", tmp_path / "hf", "--to", "hf").startswith("25 tensors")
    commit = next(record for record in parent.lineage() if record.ref.step == 4)
    source = open_source(f"{parent.folder}@4")
    params = streamed(source)
    assert_same(whole(source), params)
    expected = {leaf: value for leaf, value in commit.digest.items() if leaf.startswith("params/")}
    assert state_digest_numpy({"params": params}) == expected
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["layer_types"], config["sliding_window"]) == (["sliding_attention", "full_attention"], 8)
    assert (config["eos_token_id"], config["max_position_embeddings"], config["torch_dtype"]) == (256, 16, "float32")

    child.train("cpu-2", 4, init_from={"hf": str(tmp_path / "hf")})
    init = child.rundir().read_init()
    assert init is not None
    assert init.digest is not None
    assert init.source is not None
    assert (init.source.hf, init.source.optimizer_state) == (str(tmp_path / "hf"), False)
    padded = {"params/embedding", "params/head"}
    assert {k: v for k, v in init.digest.items() if k in expected.keys() - padded} == {
        k: v for k, v in expected.items() if k not in padded
    }
    vocabulary = small_recipe().model.vocab_size
    begun = whole(open_hugging_face(str(tmp_path / "hf"), small_recipe()))
    np.testing.assert_array_equal(begun["head"][:, :vocabulary], params["head"][:, :vocabulary])
    assert {k: v for k, v in init.digest.items() if k in expected} == state_digest_numpy({"params": begun})
    # Its first commit is damaged, and the weights it began with are gone: it says so and trains nothing else.
    (child.folder / "checkpoints/1.1/4/_METADATA").unlink()
    shutil.rmtree(tmp_path / "hf")
    gang = child.train("cpu-2", 8, expect=64)
    assert "initFrom.hf: weights" in gang.logs()
    assert "does not exist" in gang.logs()


def test_the_command_says_what_it_wrote_and_what_is_wrong(tmp_path: Path) -> None:
    said = convert(TRANSFORMERS / "gqa", tmp_path / "ours", "--to", "untildone")
    assert re.fullmatch(rf"25 tensors, 0\.\d\d MB written to {tmp_path}/ours\n", said)
    wrong = convert(TRANSFORMERS / "gqa", tmp_path / "ours", "--to", "hf", expect=64)
    assert wrong == f"error: {tmp_path}/ours exists already; remove it, or give another name\n"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    with GcsServer() as server:
        server.create_bucket("weights")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield storage.Client(project="none", credentials=AnonymousCredentials()).bucket("weights")


def test_weights_in_a_bucket_are_those_on_disk(bucket, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    convert(TRANSFORMERS / "mha", tmp_path / "ours", "--to", "untildone")
    for folder in (TRANSFORMERS / "mha", tmp_path / "ours"):
        for path in folder.rglob("*"):
            if path.is_file():
                bucket.blob(f"{folder.name}/{path.relative_to(folder)}").upload_from_filename(path)
    expected = whole(open_source(str(TRANSFORMERS / "mha")))
    assert_same(streamed(open_source("gs://weights/mha")), expected)
    assert_same(whole(open_source("gs://weights/ours")), expected)
    data = (TRANSFORMERS / "mha" / "model.safetensors").read_bytes()
    bucket.blob("short/model.safetensors").upload_from_string(data[:-5])
    bucket.blob("short/config.json").upload_from_filename(TRANSFORMERS / "mha" / "config.json")
    with pytest.raises(ConfigurationError, match=r"gs://weights/short/model\.safetensors is truncated"):
        open_source("gs://weights/short")
    with pytest.raises(ConfigurationError, match=r"gs://weights/nothing: no weights known here"):
        open_source("gs://weights/nothing")
