"""The recipes against OLMo-core's own configurations, and what may be left out of a mix."""

import json
from math import ceil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from orchestrator.api import parse_run
from orchestrator.planning import ladder
from tests.golden import inputs
from trainer.attention import visible
from trainer.errors import ConfigurationError
from trainer.model import init_params
from trainer.optimizer import adamw
from trainer.params import param_count
from trainer.recipe import Optimizer, Recipe, Yarn, load
from trainer.rope import frequencies, rope_table

GOLDEN = json.loads((inputs.HERE / "olmo_core_facts.json").read_text())
RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "trainer" / "recipes").glob("[a-z]*.py"))


@pytest.mark.parametrize(("name", "theirs", "params"), [
    ("olmo3_7b_stage1", "config_7b", "params"),
    ("olmo3_7b_stage2", "config_7b", "params"),
    ("olmo3_190m", "config_190m", "params_190m"),
])  # fmt: skip
def test_the_model_is_olmo_core_s(name: str, theirs: str, params: str) -> None:
    ours, config = load(name).model, GOLDEN[theirs]
    block = config["block"]
    mixer, norm = block["sequence_mixer"], block["layer_norm"]
    assert param_count(ours) == GOLDEN[params]
    assert (ours.d_model, ours.n_layers, ours.n_heads) == (config["d_model"], config["n_layers"], mixer["n_heads"])
    assert ours.n_kv_heads == mixer.get("n_kv_heads", mixer["n_heads"])
    assert ours.head_dim == config["d_model"] // mixer["n_heads"]
    assert ours.mlp_hidden == block["feed_forward"]["hidden_size"]
    assert ours.rope_theta == mixer["rope"]["theta"]
    assert list(ours.window_pattern) == mixer["sliding_window"]["pattern"]
    assert {ours.norm_eps} == {norm["eps"], mixer["qk_norm"]["eps"], config["lm_head"]["layer_norm"]["eps"]}
    assert ours.init_std == config["init_std"]
    assert ours.padded_vocab_size == config["vocab_size"] == GOLDEN["padded_vocab"]
    assert (block["name"], mixer["use_head_qk_norm"], config["tie_word_embeddings"]) == ("reordered_norm", False, False)
    assert (config["init_method"], config["init_seed"]) == ("normal", 0)


def test_windows_are_where_olmo_core_has_them() -> None:
    model = load("olmo3_7b_stage1").model
    assert [i for i in range(32) if model.window(i) > 0] == GOLDEN["windowed"]
    assert {model.window(i) for i in GOLDEN["windowed"]} == {GOLDEN["window_size"]} == {4096}
    seen = np.flatnonzero(visible(np.array([5000]), np.arange(6000), 4096))
    assert (seen[0], seen[-1], len(seen)) == (905, 5000, 4096), (
        "itself and 4,095 before it: flash attention's (4095, 0)"
    )


def test_yarn_is_where_olmo_core_has_it() -> None:
    model, theirs = load("olmo3_7b_stage3").model, GOLDEN["yarn_hf"]
    assert [i for i in range(32) if model.window(i) < 0] == GOLDEN["yarn_layers"]
    assert model.yarn == Yarn(
        factor=theirs["factor"], old_length=theirs["original_max_position_embeddings"],
        beta_fast=theirs["beta_fast"], beta_slow=theirs["beta_slow"],
    )  # fmt: skip
    assert model.yarn.attention_factor == theirs["attention_factor"] == 1.2079441541679836


def test_yarn_turns_as_in_olmo_core() -> None:
    golden = np.load(inputs.HERE / "olmo_core_model.npz")
    yarn = load("olmo3_7b_stage3").model.yarn
    # Theirs are float32, of float32 powers.
    np.testing.assert_allclose(frequencies(128, 500_000.0, yarn), golden["yarn/7b_frequencies"], rtol=3e-7)
    cos, sin = rope_table(64, inputs.MODEL["head_dim"], 500_000.0, Yarn(**inputs.YARN))
    for ours, theirs in ((cos, golden["yarn/cos"]), (sin, golden["yarn/sin"])):
        np.testing.assert_allclose(np.concatenate([ours, ours], axis=1), theirs, atol=3e-7)


def test_initial_weights_are_spread_as_olmo_core_s() -> None:
    """All alike, first layer or last, embeddings or projections; the norms are ones. The draws themselves are torch's."""
    model = load("olmo3_7b_stage1").model.model_copy(
        update={"d_model": 512, "n_layers": 4, "n_heads": 8, "n_kv_heads": 8, "head_dim": 64, "mlp_hidden": 1536}
        | {"padded_vocab_size": 2048, "vocab_size": 2048}
    )
    ours = jax.jit(lambda: init_params(model, 0))()
    layer = {
        "blocks.0.attention.w_q": ("wq", 0),
        "blocks.3.attention.w_out": ("wo", 3),
        "blocks.3.feed_forward.w2": ("w_down", 3),
    }
    whole = {"embeddings": "embedding", "lm_head.w_out": "head"}
    for name, (deviation, largest) in GOLDEN["init"].items():
        name = name.removesuffix(".weight")
        if name.endswith("norm"):
            assert (deviation, largest) == (0, 1)
            continue
        value = np.asarray(ours[whole[name]] if name in whole else ours[layer[name][0]][layer[name][1]])
        assert value.std() == pytest.approx(deviation, rel=0.01), name
        assert 0.058 < largest <= 0.06
        assert 0.058 < np.abs(value).max() <= 0.06


def test_documents_are_masked_in_stage_3_alone() -> None:
    masked = {name: load(f"olmo3_7b_{name}").data.mask_documents for name in ("stage1", "stage2", "stage3")}
    assert masked == {"stage1": False, "stage2": False, "stage3": True}


def test_the_seeds_are_those_of_the_official_scripts() -> None:
    seeds = [load(f"olmo3_7b_{name}").data.order.seed for name in ("stage1", "stage2", "stage3")]
    assert seeds == [34521, 1337, 34521]
    assert load("olmo3_7b_stage2").init_seed == 1337


def test_a_skip_by_multiplication_lets_nan_through() -> None:
    """What OLMo-core's update did with a NaN gradient and a factor of 0, and what ours does."""
    assert GOLDEN["nan_after_a_skip"] is True
    value, nan = {"wq": jnp.ones(2)}, {"wq": jnp.full(2, jnp.nan)}
    kept = adamw(value, value, value, nan, jnp.int32(1), jnp.float32(1e-3), Optimizer(), jnp.asarray(True))
    assert all(np.array_equal(part["wq"], np.ones(2)) for part in kept)


@pytest.mark.parametrize(("name", "tokens"), [
    ("olmo3_7b_stage2", 100e9), ("olmo3_7b_stage3", 50e9), ("olmo3_190m", 20 * (267_424_512 - 100_352 * 768)),
])  # fmt: skip
def test_the_schedule_spans_the_tokens_of_the_stage(name: str, tokens: float) -> None:
    recipe = load(name)
    assert recipe.schedule[-1].total_steps == ceil(tokens / (recipe.global_batch * recipe.sequence_length))


def test_ids_are_the_tokenizer_s() -> None:
    stage_3 = load("olmo3_7b_stage3")
    assert stage_3.data.packing is not None
    assert (stage_3.data.eos_id, stage_3.data.packing.pad_id) == (GOLDEN["eos"], GOLDEN["pad"])
    assert stage_3.model.vocab_size == 100_278


def test_heads_of_256_change_no_shape() -> None:
    assert param_count(load("olmo3_7b_stage1_head_256").model) == param_count(load("olmo3_7b_stage1").model)


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_is_named_like_its_file_and_survives_being_written_out(name: str) -> None:
    recipe = load(name)
    assert recipe.name == name
    again = Recipe.parse(recipe.model_dump_json(), name)
    assert again == recipe
    assert again.fingerprint() == recipe.fingerprint()


def test_recipes_are_different_trainings() -> None:
    assert len({load(name).fingerprint() for name in RECIPES}) == len(RECIPES) >= 7


# --- omitted files


def test_an_omitted_file_is_taken_out_and_told() -> None:
    whole = load("olmo3_7b_stage1")
    gone = [whole.data.files[700].path, whole.data.files[3].path]
    part = load("olmo3_7b_stage1", {"data.omitted_files": gone})
    assert len(part.data.files) == 1014
    assert not {file.path for file in part.data.files} & set(gone)
    assert part.data.omitted_files == tuple(gone)
    assert part.fingerprint() != whole.fingerprint()
    assert Recipe.parse(part.model_dump_json(), "again") == part


def test_what_is_left_out_is_told_apart_from_what_was_never_there() -> None:
    """The same files without a word is another recipe."""
    whole = load("olmo3_7b_stage1")
    files = whole.data.files[1:]
    silent = whole.model_copy(update={"data": whole.data.model_copy(update={"files": files})})
    told = load("olmo3_7b_stage1", {"data.omitted_files": [whole.data.files[0].path]})
    assert silent.data.files == told.data.files
    assert silent.fingerprint() != told.fingerprint()


def test_a_misspelt_omitted_file_is_refused() -> None:
    path = load("olmo3_7b_stage1").data.files[5].path
    with pytest.raises(
        ConfigurationError, match=r"data\.omitted_files names .* which is not a file of the mix; did you mean"
    ):
        load("olmo3_7b_stage1", {"data.omitted_files": [path[:-1]]})
    with pytest.raises(ConfigurationError, match=r"data\.omitted_files"):
        load("olmo3_7b_stage1", {"data.omitted_files": "text"})


def test_a_source_of_packed_files_may_be_left_out() -> None:
    whole = load("olmo3_7b_stage3")
    assert whole.data.packing is not None
    part = load("olmo3_7b_stage3", {"data.omitted_files": [whole.data.packing.sources[9]]})
    assert part.data.packing is not None
    assert len(part.data.packing.sources) == 997
    assert len(part.data.files) == 125
    with pytest.raises(ConfigurationError, match=r"data\.files has 125 files, but 992 sources in groups of 8 make 124"):
        load("olmo3_7b_stage3", {"data.omitted_files": list(whole.data.packing.sources[:6])})


# --- the example


def test_the_example_commits_as_often_as_ai2_did() -> None:
    """Their checkpointer: save_interval 1000 in stage 1; in stage 2 ephemeral_save_interval 100 besides."""
    text = (Path(__file__).parents[2] / "examples" / "kubernetes" / "olmo3-7b.yaml").read_text(encoding="utf-8")
    runs = {run.name: run for run in (parse_run(d, "olmo3-7b.yaml") for d in yaml.safe_load_all(text))}
    found = {name: (run.spec.checkpoint.every_steps, run.spec.checkpoint.keep.every) for name, run in runs.items()}
    assert found["olmo3-7b-stage1"] == (1000, 10_000)
    assert found["olmo3-7b-stage2"] == (100, 1000)


def test_the_example_of_three_stages_is_a_chain_that_can_be_planned() -> None:
    text = (Path(__file__).parents[2] / "examples" / "kubernetes" / "olmo3-7b.yaml").read_text(encoding="utf-8")
    runs = [parse_run(document, "olmo3-7b.yaml") for document in yaml.safe_load_all(text)]
    last = None
    for run in runs:
        assert run.spec.recipe.name is not None
        recipe = load(run.spec.recipe.name)
        schedule = recipe.schedule[-1]
        assert run.spec.target_step == (1_413_814 if recipe.stage == "stage1" else schedule.total_steps)
        assert all(rung.plan.global_batch == recipe.global_batch for rung in ladder(run, recipe))
        source = run.spec.init_from
        assert source is not None
        assert last is None or source.run == f"{last.spec.run_directory}@{last.spec.target_step}"
        last = run
    assert [run.spec.recipe.name for run in runs] == ["olmo3_7b_stage1", "olmo3_7b_stage2", "olmo3_7b_stage3"]
