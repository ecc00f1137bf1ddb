"""Tokenising in several processes, killed at random moments and run again; and into a bucket."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.golden import inputs
from tests.support.gcs_server import GcsServer
from tests.support.small_tokenizer import write_tokenizer
from trainer.data.output import GcsOutput
from trainer.data.tokenize import MADE
from trainer.data.tokenizer import find_tokenizer
from trainer.data.tokenizing import tokenize

ROOT = Path(__file__).parents[2]
MAX_BYTES = 1 << 20


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine inputs of a few hundred KiB."""
    folder = tmp_path_factory.mktemp("corpus")
    text = (inputs.HERE.parents[1] / "LICENSE").read_text()
    for number in range(9):
        count = 20 + 7 * number
        body = "".join(json.dumps({"id": str(i), "text": text[i:]}) + "\n" for i in range(count))
        (folder / f"{number}.jsonl").write_text(body)
    return folder


def command(source: str, out: str, tokenizer: Path, processes: int) -> list[str]:
    return [
        *(sys.executable, "-m", "trainer", "data", "tokenize", "--source", source, "--out", out),
        *("--tokenizer", str(tokenizer), "--processes", str(processes), "--max-bytes", str(MAX_BYTES)),
    ]


def stored(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_killed_at_random_moments_and_continued_it_writes_the_same_bytes(
    corpus: Path, small: Path, tmp_path: Path
) -> None:
    tokenize([str(corpus)], str(tmp_path / "whole"), find_tokenizer(str(small)), max_bytes=MAX_BYTES)
    whole, dice, kills, partly = stored(tmp_path / "whole"), random.Random(7), 0, 0
    out = tmp_path / "out"
    while not (out / MADE).exists() and kills < 60:
        process = subprocess.Popen(
            command(str(corpus), str(out), small, 1 + kills % 3), cwd=ROOT, stdout=subprocess.DEVNULL
        )
        noted = len(list(out.glob(".tokenize/*.json")))
        deadline = time.monotonic() + 60
        # Until something new is there, and then at a random moment.
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            if len(list(out.glob(".tokenize/*.json"))) > noted + (kills % 2):
                break
        time.sleep(dice.random() * 0.3)
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        kills += 1
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, "a process outlived its parent"
        partly += bool(list(out.glob(".tokenize/*.json"))) and not (out / MADE).exists()
        for path in out.glob("part-*.npy"):
            assert whole[path.name] == path.read_bytes(), "a partial file stands under a whole one's name"
    assert partly >= 2
    subprocess.run(command(str(corpus), str(out), small, 2), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert stored(out) == whole


def test_any_number_of_processes_writes_the_same(corpus: Path, small: Path, tmp_path: Path) -> None:
    for processes in (2, 20):
        out = tmp_path / str(processes)
        subprocess.run(
            command(str(corpus), str(out), small, processes), cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
    assert stored(tmp_path / "2") == stored(tmp_path / "20")


def test_a_bad_line_ends_all_processes_with_one_message(corpus: Path, small: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for path in corpus.iterdir():
        os.link(path, source / path.name)
    (source / "3.jsonl").unlink()
    (source / "3.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    out = str(tmp_path / "out")
    ran = subprocess.run(command(str(source), out, small, 3), cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 64
    assert '3.jsonl:2: the field "text" is a number, not a text' in ran.stderr
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


def test_ctrl_c_is_quiet_and_what_is_done_is_kept(corpus: Path, small: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for copy in range(100):  # more than any pause of ours between two looks lets through
        for file in corpus.iterdir():
            (source / f"{copy}-{file.name}").symlink_to(file)
    process = subprocess.Popen(
        command(str(source), str(out), small, 2), cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not list(out.glob(".tokenize/0*.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode != 0, said
    assert "Traceback" not in said
    assert list(out.glob(".tokenize/0*.json"))


# --- in a bucket


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        server.create_bucket("text")
        yield server


@pytest.fixture
def bucket(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return "gs://text"


def test_from_a_bucket_into_a_bucket(corpus: Path, small: Path, bucket: str, tmp_path: Path) -> None:
    tokenizer = find_tokenizer(str(small))
    tokenize([str(corpus)], str(tmp_path / "whole"), tokenizer, max_bytes=MAX_BYTES)
    there = GcsOutput(f"{bucket}/in")
    for path in corpus.iterdir():
        with there.file(path.name) as file:
            file.write(path.read_bytes())
    out = GcsOutput(f"{bucket}/out")
    process = subprocess.Popen(command(there.uri, out.uri, small, 2), cwd=ROOT)
    while process.poll() is None and not any(name.endswith("3.json") for name in out.names(".tokenize")):
        time.sleep(0.02)
    process.kill()
    process.wait()
    subprocess.run(command(there.uri, out.uri, small, 2), cwd=ROOT, check=True)
    assert {name: out.read(name) for name in out.names("")} == stored(tmp_path / "whole")


def test_more_pieces_than_a_bucket_joins_at_once(bucket: str, small: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for number in range(70):
        (source / f"{number:03}.jsonl").write_text(json.dumps({"text": f"input {number}"}))
    tokenizer = find_tokenizer(str(small))
    tokenize([str(source)], str(tmp_path / "out"), tokenizer)
    tokenize([str(source)], f"{bucket}/joined", tokenizer)
    out = GcsOutput(f"{bucket}/joined")
    assert {name: out.read(name) for name in out.names("")} == stored(tmp_path / "out")
