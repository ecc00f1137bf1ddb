"""The table of an `olmo_core` order: made once, never replaced, the same as the order computed in memory."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.corpus import sized
from trainer.data import order_table
from trainer.data.commands import data
from trainer.data.order import BatchOrder, open_order, table_key
from trainer.errors import ConfigurationError, TrainerError
from trainer.rundir.opening import open_store
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import AlreadyExists

RECIPE = sized(1000, kind="olmo_core")
KEY = table_key(1000, 34521, 0)


@pytest.mark.parametrize("part", [7, 1000, 1001, 1 << 22])
def test_built_once_then_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(order_table, "_PART", part)
    store = open_store(str(tmp_path))
    assert order_table.build_table(store, RECIPE, 0) == (KEY, True)
    assert order_table.build_table(store, RECIPE, 0) == (KEY, False)
    order = BatchOrder(RECIPE, store, in_memory=0)
    assert np.array_equal(order.block(0, 125), open_order(RECIPE).block(0, 125))
    assert [path.name for path in Path(tmp_path, "order").iterdir()] == [KEY.removeprefix("order/")]


@pytest.mark.parametrize("part", [7, 1000, 1 << 22])
@pytest.mark.parametrize("damage", [lambda b: b[:-4], lambda b: b + b"\0", lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_another_table_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: object, part: int
) -> None:
    monkeypatch.setattr(order_table, "_PART", part)
    store = open_store(str(tmp_path))
    order_table.build_table(store, RECIPE, 0)
    path = tmp_path / KEY
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="exists, but is not this order"):
        order_table.build_table(store, RECIPE, 0)
    assert path.read_bytes() == before


def test_a_table_that_somebody_else_makes_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    create = store.create_from_file

    def lost_race(key: str, path: object) -> None:
        create(key, path)  # type: ignore[arg-type]
        raise AlreadyExists(key)

    monkeypatch.setattr(store, "create_from_file", lost_race)
    assert order_table.build_table(store, RECIPE, 0) == (KEY, False)


def test_which_orders_need_one() -> None:
    assert order_table.needs_table(sized((1 << 24) + 1, kind="olmo_core"))
    assert not order_table.needs_table(sized(1 << 24, kind="olmo_core"))
    assert not order_table.needs_table(sized(1 << 40, kind="feistel"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner()
    folder = str(tmp_path / "run")
    rundir = RunDirectory.open(folder, create=True)
    result = run.invoke(data, ["order", "--run-directory", folder])
    assert isinstance(result.exception, ConfigurationError)
    assert "has no recipe.json yet; give --recipe and --data-root" in str(result.exception)
    rundir.create_recipe(RECIPE)
    result = run.invoke(data, ["order", "--run-directory", folder])
    assert result.exit_code == 0
    assert "no table needed" in result.output
    monkeypatch.setattr(order_table, "needs_table", lambda recipe: True)
    result = run.invoke(data, ["order", "--run-directory", folder, "--epochs", "2"])
    assert result.exit_code == 0, result.output
    assert result.output.count("written") == 2
    assert Path(folder, table_key(1000, 34521, 1)).stat().st_size == 4000
    result = run.invoke(data, ["order", "--run-directory", folder, "--epochs", "2"])
    assert result.output.count("already there, the same") == 2
    assert run.invoke(data, ["order", "--run-directory", folder, "--recipe", "tiny"]).exit_code == 2
    missing = run.invoke(data, ["order", "--run-directory", str(tmp_path / "nowhere")])
    assert isinstance(missing.exception, TrainerError)
