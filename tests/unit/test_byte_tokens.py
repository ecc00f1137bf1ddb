"""Bytes to token files: every document once, on one side, the same every time."""

from pathlib import Path

import numpy as np
import pytest

from trainer.data.byte_tokens import EOS, WINDOW, documents, tokenize
from trainer.errors import ConfigurationError


def corpus(folder: Path, count: int = 200) -> Path:
    source = folder / "texts"
    (source / "sub").mkdir(parents=True)
    (source / "tests").mkdir()
    for i in range(count):
        (source / ("sub" if i % 2 else ".") / f"{i:03}.txt").write_bytes(f"document {i} \u00e9\n".encode())
    (source / "empty.txt").write_bytes(b"")
    (source / "tests" / "no.txt").write_bytes(b"left out")
    (source / ".hidden").write_bytes(b"left out")
    return source


def read(path: Path) -> list[bytes]:
    tokens = np.fromfile(path, "<u2")
    ends = np.flatnonzero(tokens == EOS)
    assert ends[-1] == tokens.size - 1
    return [part[part != EOS].astype(np.uint8).tobytes() for part in np.split(tokens, ends + 1) if part.size]


def test_every_document_is_there_once_on_one_side(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    train, held_out = tokenize(str(source), tmp_path / "out")
    both = read(train.path) + read(held_out.path)
    assert sorted(both) == sorted(f"document {i} \u00e9\n".encode() for i in range(200))
    assert (train.documents, held_out.documents) == (len(read(train.path)), len(read(held_out.path)))
    assert 0 < held_out.documents < 30
    assert train.tokens == np.fromfile(train.path, "<u2").size
    assert [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")] == []


def test_equal_documents_lie_on_one_side(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    for i in range(200):
        (source / f"copy-{i}.txt").write_bytes(f"document {i} \u00e9\n".encode())
    train, held_out = tokenize(str(source), tmp_path / "out")
    assert not set(read(train.path)) & set(read(held_out.path))


def test_windows_that_both_sides_share_are_cut_out_of_the_held_out_file(tmp_path: Path) -> None:
    """Documents that differ only at their end: the rest of each held-out one is in the training file as well."""
    source = tmp_path / "texts"
    source.mkdir()
    for i in range(200):
        (source / f"{i}.txt").write_bytes(b"-" * WINDOW * 3 + f"{i:0{WINDOW - 1}}".encode())  # with EOS, 4 windows
    train, held_out = tokenize(str(source), tmp_path / "out")
    sides = [np.fromfile(made.path, "<u2").reshape(-1, WINDOW) for made in (train, held_out)]
    assert not {row.tobytes() for row in sides[0]} & {row.tobytes() for row in sides[1]}
    assert len(sides[1]) == held_out.documents
    assert (train.tokens, held_out.tokens) == (sides[0].size, sides[1].size)


def test_the_same_source_gives_the_same_files_and_leaves_them_alone(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    first = tokenize(str(source), tmp_path / "one")
    before = [entry.path.stat().st_mtime_ns for entry in first]
    again, other = tokenize(str(source), tmp_path / "one"), tokenize(str(source), tmp_path / "two")
    assert [e.written for e in first + again + other] == [True, True, False, False, True, True]
    assert [entry.path.stat().st_mtime_ns for entry in again] == before
    assert [e.path.read_bytes() for e in first] == [e.path.read_bytes() for e in other]


def test_other_content_is_never_replaced(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "texts-heldout.bin").write_bytes(b"something else")
    with pytest.raises(ConfigurationError, match=r"texts-heldout.bin exists with other content"):
        tokenize(str(source), out)
    assert [p.name for p in out.iterdir()] == ["texts-heldout.bin"]


def test_the_standard_library_without_its_tests() -> None:
    found = documents("stdlib")
    assert len(found) > 300
    assert all(p.suffix == ".py" for p in found)
    assert not any({"test", "tests", "idle_test", "site-packages"} & set(p.parts) for p in found)
    assert any(p.name == "argparse.py" for p in found)


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such source; give stdlib, or a folder"):
        tokenize("wikipedia", tmp_path / "out")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigurationError, match="no text files below"):
        tokenize(str(tmp_path / "nothing"), tmp_path / "out")
    (tmp_path / "nothing" / "one.txt").write_bytes(b"one document")
    with pytest.raises(ConfigurationError, match="no document for the heldout file"):
        tokenize(str(tmp_path / "nothing"), tmp_path / "out")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"--out .*file"):
        tokenize(str(tmp_path / "nothing"), tmp_path / "file")
