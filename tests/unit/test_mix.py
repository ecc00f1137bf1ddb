"""The mix: which tokens an instance is, and what is noticed when files are not what they were."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.corpus import frozen, recipe, write
from trainer.data.held_out import check_held_out, sample
from trainer.data.mix import Mix
from trainer.errors import ConfigurationError
from trainer.freezing import freeze


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_instances_are_whole_windows_of_each_file_in_order(tmp_path: Path, dtype: str) -> None:
    counts = (100, 16, 47)
    write(tmp_path, counts, dtype=dtype)
    made = freeze(recipe(bytes_per_file=(None,) * 3, dtype=dtype, batch=2), str(tmp_path))
    mix = Mix(made, str(tmp_path))
    files = [np.fromfile(tmp_path / f"f{i}.bin", np.dtype(dtype).newbyteorder("<")) for i in range(3)]
    windows = [file[w * 16 : w * 16 + 16] for file in files for w in range(len(file) // 16)]
    assert len(mix) == len(windows) == 6 + 1 + 2
    for i, window in enumerate(windows):
        assert mix.instance(i).dtype == np.int32
        assert np.array_equal(mix.instance(i), window)
    assert [mix.locate(i) for i in (0, 5, 6, 7, 8)] == [(0, 0), (0, 5), (1, 0), (2, 0), (2, 1)]
    assert mix.file_ranges() == [(0, 6), (6, 7), (7, 9)]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 363), max_size=20))
def test_rows_come_in_the_order_asked_for(tmp_path: Path, ids: list[int]) -> None:
    made = frozen(tmp_path)
    mix = Mix(made, str(tmp_path))
    rows = mix.instances(np.array(ids, np.uint64))
    assert rows.shape == (len(ids), 16)
    assert all(np.array_equal(row, mix.instance(i)) for row, i in zip(rows, ids, strict=True))


def test_an_instance_that_does_not_exist(tmp_path: Path) -> None:
    mix = Mix(frozen(tmp_path), str(tmp_path))
    for i in (-1, len(mix)):
        with pytest.raises(IndexError, match="not below"):
            mix.locate(i)


def test_check_names_what_changed_since_freezing(tmp_path: Path) -> None:
    mix = Mix(frozen(tmp_path), str(tmp_path))
    mix.check()
    write(tmp_path, (900,))
    (tmp_path / "f2.bin").unlink()
    with pytest.raises(ConfigurationError, match=r"f0.bin has 1800 bytes.*truncated.*f2.bin is missing"):
        mix.check()


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    mix = Mix(frozen(tmp_path), str(tmp_path))
    mix.instance(61)
    os.truncate(tmp_path / "f0.bin", 1000)
    mix.instance(0)
    with pytest.raises(ConfigurationError, match=r"f0.bin .* ends before byte 1984"):
        mix.instance(61)


def test_a_token_that_the_model_has_no_row_for(tmp_path: Path) -> None:
    made = frozen(tmp_path)
    tokens = np.fromfile(tmp_path / "f1.bin", "<u2")
    tokens[16 * 3 + 5] = 257
    tokens.tofile(tmp_path / "f1.bin")
    mix = Mix(made, str(tmp_path))
    mix.instance(62)
    with pytest.raises(ConfigurationError, match=r"f1.bin: token 257 in window 3 is not below model.vocab_size 257"):
        mix.instance(62 + 3)


def test_more_files_than_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data_root.MAX_OPEN_FILES", 2)
    mix = Mix(frozen(tmp_path, (160, 160, 160, 160)), str(tmp_path))
    for _ in range(3):
        mix.instances(np.arange(40, dtype=np.uint64))
    assert len(opened_below(tmp_path)) == 2


def opened_below(folder: Path) -> list[str]:
    """The open files of this process below `folder`; whatever else is open, other tests may have left."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(descriptor))
    return [name for name in found if name.startswith(str(folder))]


# -- held-out text


def mixes(folder: Path, tokens: tuple[int, ...] = (1000, 777)) -> tuple[Mix, Mix]:
    made = frozen(folder, tokens)
    return Mix(made, str(folder)), Mix(made, str(folder), "held_out")


def test_separate_text_passes(tmp_path: Path) -> None:
    assert check_held_out(*mixes(tmp_path)) is True


@pytest.mark.parametrize("how", ["copy", "link", "symlink", "inside"])
def test_held_out_text_under_another_name_is_refused(tmp_path: Path, how: str) -> None:
    write(tmp_path, (200,), ("h.bin",))
    write(tmp_path, (1000,))
    target = tmp_path / "f1.bin"
    if how == "copy":
        target.write_bytes((tmp_path / "h.bin").read_bytes())
    elif how == "link":
        os.link(tmp_path / "h.bin", target)
    elif how == "symlink":
        target.symlink_to(tmp_path / "h.bin")
    else:  # one window of it, in the middle of a training file
        body = np.arange(640, dtype="<u2") % 257
        body[320:336] = np.fromfile(tmp_path / "h.bin", "<u2")[160:176]
        body.tofile(target)
    made = freeze(recipe(bytes_per_file=(None, None), held_out=("h.bin",)), str(tmp_path))
    train, held_out = Mix(made, str(tmp_path)), Mix(made, str(tmp_path), "held_out")
    where = (
        "window 20 of f1.bin .* window 10 of h.bin" if how == "inside" else "window 0 of f1.bin .* window 0 of h.bin"
    )
    with pytest.raises(ConfigurationError, match=where):
        check_held_out(train, held_out)
    if how != "inside":  # a copy of the file is found for certain, however little of the corpus is looked at
        with pytest.raises(ConfigurationError, match=r"window 0 of f1.bin"):
            check_held_out(train, held_out, training_bytes=64)


def test_a_large_corpus_is_sampled_in_every_file(tmp_path: Path) -> None:
    train, held_out = mixes(tmp_path, (16_000, 160, 8_000))
    assert check_held_out(train, held_out, training_bytes=32 * 50) is False
    chosen = sample(train, 32 * 50)
    assert 50 <= chosen.size <= 56
    assert {0, 999, 1000, 1009, 1010, 1509} <= set(chosen.tolist())


def test_the_same_file_on_both_sides_is_refused_by_the_recipe() -> None:
    with pytest.raises(ValueError, match=r"data.held_out shares files with data.files: f0.bin"):
        recipe(held_out=("f0.bin",))
