"""Dolma's JSON lines to token files: what is written, what is refused, what an interruption leaves."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
from click.testing import CliRunner

from tests.support.small_tokenizer import END, texts_of, write_tokenizer
from trainer.data import output as outputs
from trainer.data.commands import data as command
from trainer.data.tokenize import MADE, SCRATCH, Made, plan_parts, text_of
from trainer.data.tokenizer import TokenizerFile, find_tokenizer
from trainer.data.tokenizing import tokenize
from trainer.errors import ConfigurationError
from trainer.freezing import freeze
from trainer.recipe import load

TEXTS = [f"document {i} é" + "x" * (i % 40) for i in range(120)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    return find_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"id": f"d{i}", "text": text}).encode() + b"\n" for i, text in enumerate(texts))


def write_corpus(folder: Path) -> Path:
    """Three inputs, one of each kind, and a file that is none."""
    folder.mkdir()
    (folder / "sub").mkdir()
    (folder / "a.jsonl").write_bytes(lines(TEXTS[:50]))
    (folder / "b.json.gz").write_bytes(gzip.compress(lines(TEXTS[50:60])) + gzip.compress(lines(TEXTS[60:80])))
    (folder / "sub" / "c.jsonl.zst").write_bytes(zstandard.compress(lines(TEXTS[80:])))
    (folder / "README").write_text("not a document")
    return folder


def stored(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def tokens_in(out: Path) -> list[int]:
    return np.concatenate([np.fromfile(path, "<u4") for path in sorted(out.glob("part-*.npy"))]).tolist()  # type: ignore[no-any-return]


def test_every_document_in_order_ended_by_eos(tmp_path: Path, tokenizer: TokenizerFile) -> None:
    source = write_corpus(tmp_path / "in")
    made, other = tokenize([str(source)], str(tmp_path / "out"), tokenizer)
    assert texts_of(tokens_in(tmp_path / "out"), Path(tokenizer.path).parent) == TEXTS
    assert (made.documents, made.empty, made.bad, other) == (len(TEXTS), 0, 0, 1)
    assert made.tokens == len(tokens_in(tmp_path / "out")) == sum(len(text.encode()) + 1 for text in TEXTS)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"part-00000.npy", MADE}


def test_parts_end_between_documents_and_the_stream_is_the_same(tmp_path: Path, tokenizer: TokenizerFile) -> None:
    source = write_corpus(tmp_path / "in")
    whole, _ = tokenize([str(source)], str(tmp_path / "one"), tokenizer)
    made, _ = tokenize([str(source)], str(tmp_path / "many"), tokenizer, max_bytes=2048)
    assert len(whole.files) == 1
    assert len(made.files) > 5
    assert tokens_in(tmp_path / "many") == tokens_in(tmp_path / "one")
    for file in made.files:
        tokens = np.fromfile(tmp_path / "many" / file.path, "<u4")
        assert tokens[-1] == END
        assert 4 * len(tokens) == file.bytes <= 2048 + 128


def test_a_document_larger_than_a_file_is_one_of_its_own(tmp_path: Path, tokenizer: TokenizerFile) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["small", "x" * 5000, "small again"]))
    made, _ = tokenize([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), tokenizer, max_bytes=2048)
    assert texts_of(tokens_in(tmp_path / "out"), Path(tokenizer.path).parent) == ["small", "x" * 5000, "small again"]
    assert max(file.bytes for file in made.files) > 4 * 5000


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        ([10], [[0]]),
        ([256], [[0]]),
        ([100, 100, 56, 100], [[0, 1, 2], [3]]),
        ([256, 1, 256], [[0], [1, 2]]),  # one token would make a file smaller than an instance
        ([256, 256, 1], [[0], [1, 2]]),
        ([1, 1, 1], [[0, 1, 2]]),
        ([500, 500], [[0], [1]]),
    ],
)
def test_neighbouring_pieces_make_a_part(tokens: list[int], parts: list[list[int]]) -> None:
    assert plan_parts(tokens, 1024) == parts


def test_made_again_nothing_is_touched_and_other_settings_are_refused(tmp_path: Path, tokenizer: TokenizerFile) -> None:
    source, out = write_corpus(tmp_path / "in"), tmp_path / "out"
    made, _ = tokenize([str(source)], str(out), tokenizer)
    stamps = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert tokenize([str(source)], str(out), tokenizer)[0] == made
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == stamps
    with pytest.raises(ConfigurationError, match=r"begun with other max_bytes; give another folder"):
        tokenize([str(source)], str(out), tokenizer, max_bytes=4096)
    (source / "a.jsonl").write_bytes(lines(TEXTS[:49]))
    with pytest.raises(ConfigurationError, match="begun with other inputs"):
        tokenize([str(source)], str(out), tokenizer)
    (source / "a.jsonl").write_bytes(lines(TEXTS[:50]))
    (out / "part-00000.npy").write_bytes(b"1234")
    with pytest.raises(ConfigurationError, match=r"part-00000.npy is missing or changed \(1 of 1 files\)"):
        tokenize([str(source)], str(out), tokenizer)


class Killed(BaseException):
    pass


def test_a_kill_at_any_write_is_continued_to_the_same_bytes(
    tmp_path: Path, tokenizer: TokenizerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each file appears, each join, and the removal at the end; finished inputs are not read again."""
    source = write_corpus(tmp_path / "in")
    tokenize([str(source)], str(tmp_path / "whole"), tokenizer, max_bytes=8192)
    expected = stored(tmp_path / "whole")
    replace, unlink, count = outputs.os.replace, Path.unlink, 0
    fuse = -1

    def tick(action):  # type: ignore[no-untyped-def]
        def wrapped(*arguments, **options):  # type: ignore[no-untyped-def]
            nonlocal fuse, count
            count += 1
            fuse -= 1
            if fuse == 0:
                raise Killed
            action(*arguments, **options)
            fuse -= 1
            if fuse == 0:
                raise Killed

        return wrapped

    monkeypatch.setattr(outputs.os, "replace", tick(replace))
    monkeypatch.setattr(Path, "unlink", tick(unlink))
    kills = 0
    for kill_at in range(1, 400):
        out = tmp_path / f"out-{kill_at}"
        fuse = kill_at
        try:
            tokenize([str(source)], str(out), tokenizer, max_bytes=8192)
            break
        except Killed:
            kills += 1
        fuse = -1
        assert not (out / MADE).exists() or (out / MADE).read_bytes() == expected[MADE]
        noted = {path.name for path in out.glob(f"{SCRATCH}/*.json")}
        with monkeypatch.context() as patch:
            patch.setattr("trainer.data.tokenizing.tokenize_input", _refusing(noted))
            tokenize([str(source)], str(out), tokenizer, max_bytes=8192)
        assert stored(out) == expected, f"killed at {kill_at}"
    assert kills > 20


def _refusing(noted: set[str]):  # type: ignore[no-untyped-def]
    from trainer.data.tokenize import tokenize_input

    def checked(source, number, *rest):  # type: ignore[no-untyped-def]
        assert f"{number:06}.json" not in noted, "a finished input was read again"
        return tokenize_input(source, number, *rest)

    return checked


# --- bad input


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "not JSON: .* at character 2"),
        (b"[1]", "a document is a JSON object, not list"),
        (b'{"id": "a"}', 'the field "text" is missing'),
        (b'{"text": 5}', 'the field "text" is a number, not a text'),
        (b'{"text": null}', 'the field "text" is null, not a text'),
        (b'{"text": "\xff"}', "not UTF-8: invalid start byte at byte 11"),
        (b'{"text": "\\ud800"}', 'the field "text" is not Unicode: half a character at 1'),
        (b"[" * 100_000, "nested too deeply|not JSON"),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(
    tmp_path: Path, tokenizer: TokenizerFile, line: bytes, why: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(lines(["one"]) + b"\n" + line + b"\n" + lines(["two"]))
    with pytest.raises(ConfigurationError, match=rf"bad\.jsonl:3: ({why}).*--skip-bad"):
        tokenize([str(path)], str(tmp_path / "out"), tokenizer)
    made, _ = tokenize([str(path)], str(tmp_path / "out"), tokenizer, skip_bad=True)
    assert (made.documents, made.bad) == (2, 1)
    with pytest.raises(ConfigurationError, match="made with --skip-bad, and 1 bad lines are left out"):
        tokenize([str(path)], str(tmp_path / "out"), tokenizer)


def test_texts_are_stripped_as_dolma_strips_them() -> None:
    assert text_of(b'{"text": " \\n a b \\u3000"}\r') == "a b"
    assert text_of(b'{"text": " \\t "}') == ""
    assert text_of(b"  \r") is None


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_cut_or_damaged_file_is_never_taken_for_a_whole_one(
    tmp_path: Path, tokenizer: TokenizerFile, kind: str
) -> None:
    packed = (
        gzip.compress(lines(TEXTS))
        if kind == "gz"
        else zstandard.ZstdCompressor(write_checksum=True).compress(lines(TEXTS))
    )
    path = tmp_path / "in" / f"a.jsonl.{kind}"
    path.parent.mkdir()
    (path.parent / "b.jsonl").write_bytes(lines(TEXTS))  # documents there are: what is missing would not be missed
    for number, (content, why) in enumerate(
        (
            (packed[:-3], "ends inside a (gzip|zstd) stream: it was cut off"),
            (packed[:5], "ends inside a (gzip|zstd) stream: it was cut off"),
            (b"", "ends inside a (gzip|zstd) stream: it was cut off"),
            (lines(TEXTS), "is damaged, or not (gzip|zstd)"),
            (packed[:100] + b"!!!!" + packed[104:], r"is damaged, or not|not JSON|not UTF-8|cut off"),
        )
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=why):
            tokenize([str(path.parent)], str(tmp_path / f"out-{number}"), tokenizer, skip_bad=False)
    path.write_bytes(packed)
    tokenize([str(path)], str(tmp_path / "out"), tokenizer)
    assert texts_of(tokens_in(tmp_path / "out"), Path(tokenizer.path).parent) == TEXTS


def test_sources_and_places_that_cannot_be(tmp_path: Path, tokenizer: TokenizerFile) -> None:
    source = write_corpus(tmp_path / "in")

    def refused(sources: list[str], out: str, why: str) -> None:
        with pytest.raises(ConfigurationError, match=why):
            tokenize(sources, out, tokenizer)

    out = str(tmp_path / "out")
    refused([str(tmp_path / "none")], out, "--source .*none does not exist")
    refused([str(tmp_path / "none.jsonl")], out, r"input none\.jsonl is missing below")
    (tmp_path / "void").mkdir()
    refused([str(tmp_path / "void")], out, r"no file below it ends in \.jsonl, ")
    (tmp_path / "a.txt").write_bytes(lines(TEXTS))
    refused([str(tmp_path / "a.txt")], out, r"a\.txt does not end in any of \.jsonl, ")
    refused(["s3://bucket/a"], out, "unknown scheme; give a folder or a gs:// prefix")
    refused([str(source)], "s3://bucket/a", "--out s3://bucket/a: unknown scheme")
    refused([str(source), str(source / "a.jsonl")], out, r"a\.jsonl is in it twice")
    refused([str(source)], str(source / "tokens"), "lies below --source")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "part-00000.npy").write_bytes(b"1234")
    refused([str(source)], str(tmp_path / "taken"), r"part-00000\.npy is there already and is not ours")
    refused([str(source)], str(source / "a.jsonl" / "x"), "lies below|--out .*Not a directory")
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    refused([str(tmp_path / "empty.jsonl")], out, "there is no document in it")


def test_two_at_once_on_one_folder(tmp_path: Path, tokenizer: TokenizerFile) -> None:
    source, out = write_corpus(tmp_path / "in"), tmp_path / "out"
    with (
        outputs.DiskOutput(str(out)).alone(),
        pytest.raises(ConfigurationError, match="another process is writing here"),
    ):
        tokenize([str(source)], str(out), tokenizer)


def test_tokenizers_that_cannot_be(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t")
    assert find_tokenizer(str(folder / "tokenizer.json")).eos_id == END
    assert find_tokenizer(str(folder), 7).eos_id == 7
    with pytest.raises(ConfigurationError, match=r"--eos-id 257: .* has the ids 0 to 256"):
        find_tokenizer(str(folder), 257)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ConfigurationError, match="</s> is no token of it; say which id ends a document: --eos-id"):
        find_tokenizer(str(folder))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigurationError, match="says what its eos_token is"):
        find_tokenizer(str(folder))
    with pytest.raises(ConfigurationError, match=r"there is no file .*none"):
        find_tokenizer(str(tmp_path / "none"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"bad\.json is no tokenizer\.json"):
        find_tokenizer(str(tmp_path / "bad.json"))


# --- the command


@pytest.fixture
def ran(tmp_path: Path, tokenizer: TokenizerFile) -> str:
    source = write_corpus(tmp_path / "in")
    options = ["--source", str(source), "--out", str(tmp_path / "out"), "--tokenizer", str(Path(tokenizer.path).parent)]
    result = CliRunner().invoke(command, ["tokenize", *options, "--processes", "1", "--max-bytes", "2048"])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_says_how_a_recipe_reads_it_and_data_check_accepts_it(ran: str, tmp_path: Path) -> None:
    made = Made.parse({k: v for k, v in json.loads((tmp_path / "out" / MADE).read_text()).items() if k != "data"}, MADE)
    assert f"{len(made.files)} files below" in ran
    assert "left out: 0 empty texts, 0 bad lines, 1 files that are no JSON lines" in ran
    assert f'DataFile(path=f"part-{{i:05}}.npy") for i in range({len(made.files)})' in ran
    assert 'dtype="uint32", eos_id=256' in ran
    fields = json.loads((tmp_path / "out" / MADE).read_text())["data"]
    overrides = {f"data.{name}": value for name, value in fields.items()} | {"data.held_out": [], "global_batch": 2}
    recipe = load("tiny", overrides)
    path = tmp_path / "recipe.json"
    path.write_text(recipe.model_dump_json())
    assert freeze(recipe, str(tmp_path / "out")).data.files == recipe.data.files
    checked = CliRunner().invoke(command, ["check", "--recipe", str(path), "--data-root", str(tmp_path / "out")])
    assert checked.exit_code == 0, checked.output
    assert f"in {len(made.files)} files" in checked.output
    assert "warning" not in checked.output
    path.write_text(load("tiny", overrides | {"data.eos_id": 0}).model_dump_json())
    checked = CliRunner().invoke(command, ["check", "--recipe", str(path), "--data-root", str(tmp_path / "out")])
    assert "warning: data.eos_id 0, which ends documents, is nowhere in the" in checked.output
    told = load(
        "tiny", overrides | {"data.files": fields["files"][1:], "data.omitted_files": [fields["files"][0]["path"]]}
    )
    path.write_text(told.model_dump_json())
    checked = CliRunner().invoke(command, ["check", "--recipe", str(path), "--data-root", str(tmp_path / "out")])
    assert "left out of the mix by the recipe, and not among the instances: 1 files (part-00000.npy)" in checked.output
