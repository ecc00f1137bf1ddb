"""A run that begins with Hugging Face's weights: the same parameters on any mesh, and no other model's."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

from tests.support.goldens import MODELS, TRANSFORMERS, assert_same, whole
from tests.support.models import small_recipe
from trainer import beginning, convert
from trainer.checkpoint import Checkpoints
from trainer.cli import cli
from trainer.digest import state_digest, state_digest_numpy
from trainer.errors import ConfigurationError
from trainer.recipe import Recipe, Yarn
from trainer.settings import InitFrom
from trainer.sharding import mesh_of, param_shardings
from trainer.step import abstract_state
from trainer.weights.on_mesh import load_params
from trainer.weights.sources import open_hugging_face, open_source


def recipe_of(name: str, **changes: object) -> Recipe:
    model = open_source(str(TRANSFORMERS / name)).description.model
    return small_recipe(model=model.model_copy(update={"padded_vocab_size": 72, **changes}))


def built(folder: Path, recipe: Recipe, devices: int) -> object:
    init, expected = beginning.resolve(InitFrom(hf=str(folder)))
    assert expected is None
    return beginning.build(init, recipe, mesh_of(jax.devices()[:devices]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [1, 8])
def test_the_parameters_are_those_of_the_files_on_any_mesh(name: str, devices: int) -> None:
    recipe = recipe_of(name)
    source = open_hugging_face(str(TRANSFORMERS / name), recipe)
    params = load_params(source, param_shardings(recipe.model, mesh_of(jax.devices()[:devices])))
    assert_same({key: np.asarray(value) for key, value in params.items()}, whole(source))
    assert len(params["w_gate"].sharding.device_set) == devices


def test_the_rest_of_the_state_is_that_of_step_0() -> None:
    recipe = recipe_of("mha")
    state = built(TRANSFORMERS / "mha", recipe, 8)
    wanted = abstract_state(recipe, mesh_of(jax.devices()[:8]))
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), state) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.sharding), wanted
    )
    digest = state_digest(state)
    expected = state_digest_numpy({"params": whole(open_source(str(TRANSFORMERS / "mha"), recipe))})
    assert {leaf: value for leaf, value in digest.items() if leaf.startswith("params/")} == expected
    assert not any(value for leaf, value in digest.items() if not leaf.startswith("params/"))


def test_a_later_stage_may_turn_yarn_on_and_nothing_else() -> None:
    open_hugging_face(str(TRANSFORMERS / "mha"), recipe_of("mha", yarn=Yarn(factor=8, old_length=64)))
    with pytest.raises(
        ConfigurationError, match=r"initFrom\.hf: .*model\.window_pattern is \[5, -1, 4, -1\], there it is"
    ):
        built(TRANSFORMERS / "mha", recipe_of("mha", window_pattern=(5, -1, 4, -1)), 1)
    with pytest.raises(ConfigurationError, match=r"model\.rope_theta is 10000\.0, there it is 500000\.0"):
        built(TRANSFORMERS / "mha", recipe_of("mha", rope_theta=1e4), 1)


def test_files_that_changed_since_the_run_began_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(TRANSFORMERS / "mha", folder)
    init, _ = beginning.resolve(InitFrom(hf=str(folder)))
    recipe = recipe_of("mha")
    mesh = mesh_of(jax.devices()[:1])
    first = state_digest(beginning.build(init, recipe, mesh, None))  # type: ignore[arg-type]
    init = init.model_copy(update={"digest": first})
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.o_proj.weight"][3, 5] += 1
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"changed since this run began .*params/wo"):
        beginning.check_again(init, state_digest(beginning.build(init, recipe, mesh, None)))  # type: ignore[arg-type]


def test_what_is_asked_for_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="hf has no optimizer state; leave optimizer_state out"):
        InitFrom.parse({"hf": "/a", "optimizer_state": True}, "settings")
    with pytest.raises(ConfigurationError, match="exactly one of run, checkpoint and hf"):
        InitFrom.parse({"hf": "/a", "run": "/b"}, "settings")
    assert InitFrom.parse({"hf": "/a"}, "settings") == InitFrom(hf="/a", optimizer_state=False)
    assert InitFrom.parse(json.loads(InitFrom(hf="/a").model_dump_json()), "init.json") == InitFrom(hf="/a")
    with pytest.raises(ConfigurationError, match=r"initFrom\.hf: weights /nowhere does not exist"):
        built(Path("/nowhere"), recipe_of("mha"), 1)


def test_a_converted_folder_begins_a_run_like_the_original(tmp_path: Path) -> None:
    """By Orbax, as any checkpoint."""
    recipe, mesh = recipe_of("gqa"), mesh_of(jax.devices()[:8])
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.model_dump(mode="json")))
    folder = tmp_path / "ours"
    convert.run(str(TRANSFORMERS / "gqa"), str(folder), "untildone", None, str(tmp_path / "recipe.json"), ())
    source = InitFrom(checkpoint=str(folder), optimizer_state=False)
    state = beginning.build(beginning.resolve(source)[0], recipe, mesh, Checkpoints())
    assert state_digest(state) == state_digest(built(TRANSFORMERS / "gqa", recipe, 8))
    with pytest.raises(ConfigurationError, match=r"weights alone, set initFrom\.optimizerState: false"):
        beginning.build(beginning.resolve(InitFrom(checkpoint=str(folder)))[0], recipe, mesh, Checkpoints())


@pytest.mark.parametrize("source", ["hf:{here}/nowhere", "{here}/no-run@4", "{here}/run@x"])
def test_a_source_that_is_not_there_leaves_no_run_directory_with_a_recipe(tmp_path: Path, source: str) -> None:
    """The recipe of a run is fixed for good: a mistake in the command must show before."""
    random = np.random.default_rng(0)
    for file in ("stdlib-train.bin", "stdlib-heldout.bin"):
        random.integers(0, 256, 64 * 4096).astype("<u2").tofile(tmp_path / file)
    command = ["train", "--recipe", "tiny", "--run-directory", str(tmp_path / "run"), "--data-root", str(tmp_path)]
    done = CliRunner().invoke(cli, [*command, "--target", "4", "--init-from", source.format(here=tmp_path)], obj=0.0)
    assert isinstance(done.exception, ConfigurationError), done.output
    assert not (tmp_path / "run" / "recipe.json").exists()
