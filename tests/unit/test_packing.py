"""Packing against OLMo-core's packed dataset on the same files, and what the packed files promise."""

import hashlib
import json
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import inputs
from tests.support.corpus import recipe
from trainer.data.commands import data as command
from trainer.data.mix import Mix
from trainer.data.packing import documents, groups, pack, packed_instances, write_packed
from trainer.errors import ConfigurationError
from trainer.freezing import freeze
from trainer.recipe import DataFile, Packing, Recipe

GOLDEN = json.loads((inputs.HERE / "olmo_core_packing.json").read_text())
SIZE = inputs.PACKED_LENGTH


def packed_groups(distinct: bool) -> list[np.ndarray]:
    files = inputs.mix_files(distinct)
    grouped = [files[i : i + inputs.PACKED_GROUP] for i in range(0, len(files), inputs.PACKED_GROUP)]
    return [packed_instances(group, SIZE, inputs.EOS, inputs.PAD)[0] for group in grouped]


def document_lengths(row: np.ndarray) -> list[int]:
    """As the devices see them: up to each EOS, and what is left."""
    ends = [*(np.flatnonzero(row == inputs.EOS) + 1).tolist(), len(row)]
    return [b - a for a, b in zip([0, *ends], ends, strict=False) if b > a]


def hashed(row: np.ndarray) -> str:
    return hashlib.sha256(row.astype("<u4").tobytes()).hexdigest()[:16]


def test_packed_instances_are_olmo_core_s() -> None:
    found = packed_groups(distinct=True)
    golden = GOLDEN["distinct"]
    sizes = np.cumsum([0, *map(len, found)]).tolist()
    assert [list(pair) for pair in pairwise(sizes)] == golden["groups"]
    rows = np.concatenate(found)
    assert [hashed(row) for row in rows] == golden["tokens"]
    assert [document_lengths(row) for row in rows] == golden["lengths"]
    assert [int((row != inputs.PAD).sum()) for row in rows] == golden["targets"]


def test_where_documents_are_equally_long_only_they_may_trade_places() -> None:
    """Their sort is not stable. Lengths, padding and the documents of each group are theirs all the same."""
    found, golden = packed_groups(distinct=False), GOLDEN["ties"]
    rows = np.concatenate(found)
    assert [document_lengths(row) for row in rows] == golden["lengths"]
    assert [int((row != inputs.PAD).sum()) for row in rows] == golden["targets"]
    assert sum(count > 1 for count in Counter(len(d) for d in inputs.text_documents() * 2).values()) > 10
    for group, (first, end) in zip(found, golden["groups"], strict=True):
        assert len(group) == end - first


@pytest.mark.parametrize("case", range(len(GOLDEN["algorithm"])))
def test_any_lengths_are_dealt_out_as_by_olmo_core_s_packer(case: int) -> None:
    golden = GOLDEN["algorithm"][case]
    assert pack(np.array(golden["lengths"]), golden["size"]) == golden["bins"]


@given(size=st.integers(1, 300), shares=st.lists(st.floats(0, 1, exclude_max=True), max_size=80))
def test_packing_is_best_fit_decreasing(size: int, shares: list[float]) -> None:
    """Against the plainest form: every open instance is looked at for every document."""
    lengths = np.array([1 + int(share * size) for share in shares], np.int64)
    rooms: list[int] = []
    bins: list[list[int]] = []
    since: list[int] = []
    for turn, document in enumerate(sorted(range(len(lengths)), key=lambda d: -lengths[d])):
        fitting = [b for b in range(len(bins)) if rooms[b] >= lengths[document]]
        if fitting:
            chosen = min(fitting, key=lambda b: (rooms[b], since[b]))
        else:
            chosen = len(bins)
            bins.append([])
            rooms.append(size)
            since.append(0)
        bins[chosen].append(document)
        rooms[chosen] -= int(lengths[document])
        since[chosen] = turn
    assert pack(lengths, size) == bins


def test_hundreds_of_thousands_of_documents_are_packed_in_seconds() -> None:
    """As many as a group of stage 3 may have. Half a minute would still do; this catches a quadratic mistake."""
    lengths = (1 + inputs.uniform(1, 300_000) ** 4 * 65_536).astype(np.int64).clip(max=65_536)
    began = time.process_time()
    bins = pack(lengths, 65_536)
    assert time.process_time() - began < 15
    assert sorted(d for one in bins for d in one) == list(range(len(lengths)))
    filled = lengths.sum() / (len(bins) * 65_536)
    assert filled > 0.995


def test_documents_end_with_their_eos_and_are_cut() -> None:
    starts, lengths = documents(np.array([5, 9, 9, 1, 2, 3, 4, 9, 7, 7], np.uint16), 9, 3)
    assert starts.tolist() == [0, 2, 3]
    assert lengths.tolist() == [2, 1, 3]
    assert [a.tolist() for a in documents(np.array([1, 2], np.uint16), 9, 3)] == [[], []]


# --- packed files


def packed_recipe() -> Recipe:
    base = recipe(bytes_per_file=(None,), length=SIZE, dtype="uint32", vocab=320, batch=2)
    sources = tuple(f"{i:06d}.npy" for i in range(inputs.MIX_FILES))
    files = tuple(DataFile(path=f"packed/{i:03d}.npy") for i in range(3))
    packing = Packing(sources=sources, group_size=inputs.PACKED_GROUP, pad_id=inputs.PAD)
    data = base.data.model_copy(update={"files": files, "packing": packing})
    return Recipe.model_validate(base.model_copy(update={"data": data}).model_dump())


def test_packed_files_are_read_like_any_others(tmp_path: Path) -> None:
    inputs.write_mix(tmp_path)
    made = list(write_packed(packed_recipe(), str(tmp_path), str(tmp_path)))
    expected = np.concatenate(packed_groups(distinct=False))
    assert sum(one.instances for one in made) == len(expected)
    assert [one.sources for one in made] == groups(packed_recipe().data.packing)  # type: ignore[arg-type]
    paragraphs = inputs.text_documents()
    dealt = paragraphs + paragraphs[: len(paragraphs) // 2]
    unfinished = dealt[inputs.MIX_FILES - 1 :: inputs.MIX_FILES][-1]  # the last of the last file has no EOS
    assert sum(one.documents for one in made) == len(dealt) - 1
    assert sum(one.cut_documents for one in made) == sum(len(d) > SIZE for d in dealt) - (len(unfinished) > SIZE)
    frozen = freeze(packed_recipe(), str(tmp_path))
    mix = Mix(frozen, str(tmp_path))
    np.testing.assert_array_equal(mix.instances(np.arange(len(mix), dtype=np.uint64)), expected)


def test_an_interrupted_packing_is_continued_and_other_sources_are_noticed(tmp_path: Path) -> None:
    inputs.write_mix(tmp_path)
    first = next(write_packed(packed_recipe(), str(tmp_path), str(tmp_path)))
    stamp = (tmp_path / first.path).stat().st_mtime_ns
    assert len(list(write_packed(packed_recipe(), str(tmp_path), str(tmp_path)))) == 3
    assert (tmp_path / first.path).stat().st_mtime_ns == stamp
    (tmp_path / "000001.npy").write_bytes(b"\0" * 4096)
    with pytest.raises(ConfigurationError, match=r"packed/000\.npy was packed from other files"):
        list(write_packed(packed_recipe(), str(tmp_path), str(tmp_path)))
    assert not list(tmp_path.glob("packed/*.tmp"))


def test_the_command_packs_and_says_what_was_lost(tmp_path: Path) -> None:
    inputs.write_mix(tmp_path)
    path = tmp_path / "recipe.json"
    path.write_text(packed_recipe().model_dump_json())
    ran = CliRunner().invoke(
        command, ["pack", "--recipe", str(path), "--data-root", str(tmp_path), "--out", str(tmp_path)]
    )
    assert ran.exit_code == 0, ran.output
    assert "3 files" in ran.output
    assert "instances" in ran.output
    assert "cut" in ran.output
    refused = CliRunner().invoke(command, ["pack", "--recipe", "tiny", "--data-root", str(tmp_path), "--out", "x"])
    assert "has no data.packing" in str(refused.exception)


def test_a_recipe_says_what_is_wrong_with_its_packing() -> None:
    def changed(**changes: object) -> None:
        body = packed_recipe().model_dump()
        body["data"]["packing"].update(changes)
        Recipe.parse(body, "recipe")

    with pytest.raises(ConfigurationError, match=r"data.files has 3 files, but 5 sources in groups of 3 make 2"):
        changed(group_size=3)
    with pytest.raises(ConfigurationError, match=r"pad_id 256 is data\.eos_id"):
        changed(pad_id=inputs.EOS)
    with pytest.raises(ConfigurationError, match=r"pad_id 320 is not below model\.vocab_size 320"):
        changed(pad_id=320)
