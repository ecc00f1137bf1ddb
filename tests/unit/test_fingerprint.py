"""Everything that decides the numbers is in the fingerprint, and every way into a run compares it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import runs
from tests.support.models import small_recipe
from trainer.environment import GangEnvironment
from trainer.errors import ConfigurationError
from trainer.recipe import DataFile, Recipe
from trainer.restore import Restorer
from trainer.rundir.disk import DiskStore
from trainer.rundir.records import RecipeRecord
from trainer.rundir.rundir import RunDirectory
from trainer.train import read_orders


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(node, dict):
        return [leaf for key, value in node.items() for leaf in leaves(value, (*path, key))]
    if isinstance(node, list) and node:
        return [leaf for key, value in enumerate(node) for leaf in leaves(value, (*path, key))]
    return [path]


def other(value: Any) -> Any:
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, (int, float)):
        return value + 1
    return [*value, "x.bin"] if isinstance(value, list) else 12345


def test_each_field_of_a_recipe_but_its_name_changes_the_fingerprint() -> None:
    recipe = small_recipe()
    files = (DataFile(path="a.bin", bytes=1 << 20),)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"files": files})})
    body = recipe.model_dump(mode="json")
    assert set(body) == set(Recipe.model_fields)
    for path in leaves(body):
        changed = recipe.model_dump(mode="json")
        node = changed
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = other(node[path[-1]])
        made = _unchecked(recipe, changed)
        assert (made.fingerprint() == recipe.fingerprint()) == (path == ("name",)), path


def _unchecked(recipe: Recipe, body: dict[str, Any]) -> Recipe:
    """A recipe with exactly these values, whether or not they make sense together."""

    class Raw(Recipe):
        def model_dump(self, *, exclude: set[str] | None = None, **_: Any) -> dict[str, Any]:  # type: ignore[override]
            return {key: value for key, value in body.items() if key not in (exclude or set())}

    return Raw.model_construct(**recipe.__dict__)


def begun(folder: Path, recipe: Recipe, fingerprint: str) -> RunDirectory:
    rundir = RunDirectory(DiskStore(folder), patience_seconds=0)
    rundir.create("recipe.json", RecipeRecord(fingerprint=fingerprint, recipe=recipe))
    runs.submit(rundir, 1)
    return rundir


def test_a_recipe_that_this_version_reads_differently_trains_nothing(tmp_path: Path) -> None:
    recipe = small_recipe()
    environment = GangEnvironment(str(tmp_path), 1, "nonce", "pod", 0, 0, 1, "127.0.0.1:1")
    rundir = begun(tmp_path, recipe, "0" * 64)
    with pytest.raises(ConfigurationError, match=r"recipe\.json .* would train something else"):
        read_orders(rundir, environment)


def test_a_commit_of_another_recipe_is_never_restored(tmp_path: Path) -> None:
    recipe = small_recipe()
    rundir = begun(tmp_path, recipe, recipe.fingerprint())
    claim = runs.claim(rundir)
    record = runs.commit(claim, 4)
    assert record.fingerprint != recipe.fingerprint()
    gang: Any = None
    restorer = Restorer(rundir, claim, gang, gang, recipe, None, lambda: None)  # asked for nothing before the refusal
    with pytest.raises(ConfigurationError, match="one of the two was changed"):
        restorer.restore(record, None)
