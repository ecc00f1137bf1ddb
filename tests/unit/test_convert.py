"""Weights from and to the formats of others: nothing lost on the way, and everything that does not fit is named."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.support.goldens import MODELS, TRANSFORMERS, assert_same, random_params, streamed, whole
from tests.support.models import small_model, small_recipe
from trainer import convert
from trainer.checkpoint import Checkpoints
from trainer.errors import ConfigurationError
from trainer.recipe import Model, Yarn, load
from trainer.sharding import mesh_of, param_shardings
from trainer.weights import writing
from trainer.weights.checkpoint import CheckpointSource, write_checkpoint
from trainer.weights.description import Description, different, from_config, of_recipe, to_config
from trainer.weights.folder import Folder
from trainer.weights.slots import DTYPES, Slot, from_ours, slots, to_ours
from trainer.weights.sources import open_source

MODEL = small_model()
DESCRIPTION = Description(model=MODEL, max_positions=12, eos_id=0)


def values(params: dict[str, np.ndarray], model: Model) -> Iterator[tuple[Slot, np.ndarray]]:
    for slot in reversed(slots(model)):
        yield slot, params[slot.parameter] if slot.layer is None else params[slot.parameter][slot.layer]


def call(source: object, destination: Path, target: str, dtype: str | None = None, recipe: str | None = None) -> str:
    return convert.run(str(source), str(destination), target, dtype, recipe, ())


def recipe_file(folder: Path, **changes: Any) -> str:
    path = folder / "recipe.json"
    path.write_text(json.dumps(small_recipe(model=MODEL, **changes).model_dump(mode="json")))
    return str(path)


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_s_own_files_come_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    """transformers' bf16 file → our checkpoint → a bf16 file."""
    original = TRANSFORMERS / name
    call(original, tmp_path / "ours", "untildone")
    said = call(tmp_path / "ours", tmp_path / "back", "hf", "bfloat16")
    theirs = safetensors.numpy.load_file(original / "model.safetensors")
    assert said.startswith(f"{len(theirs)} tensors")
    back = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    assert theirs.keys() == back.keys()
    for key in theirs:
        assert theirs[key].dtype == back[key].dtype
        assert theirs[key].shape == back[key].shape
        assert theirs[key].tobytes() == back[key].tobytes(), key
    written, given = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "back", original))
    assert written.pop("torch_dtype") == given.pop("dtype") == "bfloat16"
    if given["rope_scaling"]:
        assert written["rope_scaling"].pop("attention_factor") == pytest.approx(0.1 * np.log(8) + 1)
    assert {key: written[key] for key in given} == given
    assert {key: value for key, value in written.items() if key not in given} == {"bos_token_id": None}


def test_float32_makes_the_round_trip_bit_for_bit(tmp_path: Path) -> None:
    params = random_params(MODEL)
    write_checkpoint(tmp_path / "a", DESCRIPTION, values(params, MODEL))
    source = open_source(str(tmp_path / "a"))
    assert_same(whole(source), params)
    assert_same(streamed(source), params)
    call(tmp_path / "a", tmp_path / "hf", "hf")
    call(tmp_path / "hf", tmp_path / "b", "untildone", recipe=recipe_file(tmp_path))
    call(tmp_path / "a", tmp_path / "oc", "olmo-core")
    call(tmp_path / "oc", tmp_path / "c", "untildone", recipe=recipe_file(tmp_path))
    assert_same(whole(open_source(str(tmp_path / "c"), small_recipe(model=MODEL))), params)
    back = whole(open_source(str(tmp_path / "b")))
    for name in ("embedding", "head"):
        vocabulary = 0 if name == "embedding" else 1
        real = np.arange(MODEL.vocab_size)
        np.testing.assert_array_equal(
            np.take(back.pop(name), real, vocabulary), np.take(params[name], real, vocabulary)
        )
    assert_same(back, {name: params[name] for name in back})


def test_a_commit_of_many_devices_is_read_in_pieces(tmp_path: Path) -> None:
    """As a run saves it: all layers of an eighth of each matrix in one chunk."""
    params = random_params(MODEL)
    mesh = mesh_of(jax.devices()[:8])
    sharded = {k: jax.device_put(params[k], sharding) for k, sharding in param_shardings(MODEL, mesh).items()}
    checkpoints, path = Checkpoints(), str(tmp_path / "commit")
    checkpoints.begin_save(path, {"params": sharded})
    checkpoints.wait(path)
    source = CheckpointSource(Folder(path), DESCRIPTION)
    assert_same(streamed(source), params)
    assert_same(whole(source), params)


def test_bfloat16_rounds_to_the_nearest_even(tmp_path: Path) -> None:
    params = random_params(MODEL)
    params["norm"][:2] = [1 + 2**-8, 1 + 3 * 2**-8]  # halfway between two neighbours: to the even one
    write_checkpoint(tmp_path / "a", DESCRIPTION, values(params, MODEL))
    call(tmp_path / "a", tmp_path / "hf", "hf", "bfloat16")
    found = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert found["model.norm.weight"][:2].astype(np.float32).tolist() == [1.0, 1 + 2**-6]
    np.testing.assert_array_equal(found["lm_head.weight"], params["head"].T[:30].astype(ml_dtypes.bfloat16))


def test_a_checkpoint_of_olmo_core_is_read_without_torch(tmp_path: Path) -> None:
    """Written by OLMo-core from two processes, of the weights that `gqa` has."""
    gqa = open_source(str(TRANSFORMERS / "gqa"))
    body = small_recipe(model=gqa.description.model.model_copy(update={"padded_vocab_size": 64}))
    (tmp_path / "recipe.json").write_text(json.dumps(body.model_dump(mode="json")))
    with pytest.raises(ConfigurationError, match="OLMo-core do not say what model they are of; give --recipe"):
        open_source(str(TRANSFORMERS / "olmo_core"))
    found = whole(open_source(str(TRANSFORMERS / "olmo_core"), body))
    expected = whole(open_source(str(TRANSFORMERS / "gqa"), body))
    assert_same(found, expected)
    broken = tmp_path / "broken"
    shutil.copytree(TRANSFORMERS / "olmo_core", broken)
    (broken / "__1_0.distcp").unlink()
    with pytest.raises(
        ConfigurationError, match=r"__1_0\.distcp is missing, which holds a piece of embeddings\.weight"
    ):
        whole(open_source(str(broken), body))


def test_shards_are_cut_at_the_limit_and_indexed(tmp_path: Path) -> None:
    params = random_params(MODEL)
    limit = 3000
    writing.write_hugging_face(tmp_path, DESCRIPTION, values(params, MODEL), "float32", shard_bytes=limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    tensors = {file: safetensors.numpy.load_file(tmp_path / file) for file in files}
    assert {name: file for file in files for name in tensors[file]} == index["weight_map"]
    sizes = [sum(t.nbytes for t in tensors[file].values()) for file in files]
    assert (
        max(sizes) <= limit
        or max(len(tensors[file]) for file in files if sum(t.nbytes for t in tensors[file].values()) > limit) == 1
    )
    assert sum(sizes) == index["metadata"]["total_size"]
    assert_same(streamed(open_source(str(tmp_path))), whole(open_source(str(tmp_path))))


def test_the_7b_has_its_355_tensors_and_the_vocabulary_is_cut(tmp_path: Path) -> None:
    recipe = load("olmo3_7b_stage1")
    found = slots(recipe.model)
    assert len(found) == len({slot.hf for slot in found}) == len({slot.olmo_core for slot in found}) == 355
    shapes = {slot.hf: slot.shape for slot in found}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (100_278, 4096)
    assert shapes["model.layers.31.mlp.down_proj.weight"] == (4096, 11_008)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (11_008, 4096)
    assert sum(int(np.prod(slot.shape)) for slot in found) == 7_298_011_136


def test_padding_rows_can_take_almost_nothing_of_the_probability() -> None:
    """Wherever the logits lie: the public weights were trained with a z-loss, and nothing else says where that is."""
    head = next(slot for slot in slots(MODEL) if slot.parameter == "head")
    embedding = next(slot for slot in slots(MODEL) if slot.parameter == "embedding")
    random = np.random.default_rng(0)
    rows = (random.normal(size=head.shape) + 2).astype(np.float32)
    hidden = random.normal(size=(50, MODEL.d_model)).astype(np.float32) - 2
    assert (hidden @ rows.T).max() < -20  # far below a logit of 0
    padded = to_ours(head, rows, MODEL)
    assert padded.shape == (MODEL.d_model, MODEL.padded_vocab_size)
    exp = np.exp((hidden @ padded).astype(np.float64))
    taken = exp[:, MODEL.vocab_size :].sum(1) / exp.sum(1)
    assert taken.max() <= (MODEL.padded_vocab_size - MODEL.vocab_size) / MODEL.vocab_size
    assert not to_ours(embedding, rows, MODEL)[MODEL.vocab_size :].any()
    np.testing.assert_array_equal(from_ours(head, padded, DTYPES["float32"]), rows)


# -- config.json


def test_config_of_each_stage_of_the_7b() -> None:
    """The public OLMo 3 7B: stages 1 and 2 without rope scaling and 8192 positions, the last with YaRN and 65536."""
    recipe = load("olmo3_7b_stage1")
    first = to_config(of_recipe(recipe), "bfloat16")
    assert first["rope_scaling"] is None
    assert (first["max_position_embeddings"], first["sliding_window"], first["vocab_size"]) == (8192, 4096, 100_278)
    assert (first["eos_token_id"], first["pad_token_id"]) == (100_257, 100_277)
    assert (first["rope_theta"], first["rms_norm_eps"]) == (500_000, 1e-6)
    assert [i for i, kind in enumerate(first["layer_types"]) if kind == "full_attention"] == list(range(3, 32, 4))
    model = recipe.model.model_copy(update={"yarn": Yarn(factor=8, old_length=8192)})
    last = to_config(of_recipe(recipe.model_copy(update={"model": model, "sequence_length": 65_536})), "bfloat16")
    assert last["max_position_embeddings"] == 65_536
    assert last["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.2079441541679836,
    }
    for config, stage_model in ((first, recipe.model), (last, model)):
        read = from_config(config, "config.json")
        assert different(read.model, stage_model) == []
        assert read.model.padded_vocab_size == 100_352


def test_the_rope_parameters_of_transformers_5_are_read() -> None:
    config = json.loads((TRANSFORMERS / "yarn" / "config.json").read_text())
    plain = from_config(config, "config.json")
    scaling, theta = config.pop("rope_scaling"), config.pop("rope_theta")
    full = {**scaling, "rope_theta": theta}
    nested = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}
    for parameters in (full, nested):
        assert from_config({**config, "rope_parameters": parameters}, "config.json") == plain
    nested["sliding_attention"] = full
    with pytest.raises(ConfigurationError, match="no scaling on windowed layers"):
        from_config({**config, "rope_parameters": nested}, "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "olmo2"}, "model_type is 'olmo2', expected 'olmo3'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, expected False"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"hidden_size": None}, "hidden_size is None, expected a number"),
        ({"num_attention_heads": 5}, "hidden_size is 24, expected a multiple of num_attention_heads 5"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* expected 4 times"),
        ({"layer_types": ["sliding_attention"] * 4}, r"layer_types\[-1\] .* the last layer of OLMo 3 is full"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type is 'linear', expected 'yarn'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.0}}, "attention_factor is 1.0"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: factor is None, expected a number"),
        ({"num_key_value_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
    ],
)
def test_what_config_json_says_otherwise_is_named(changes: dict[str, Any], message: str) -> None:
    config = json.loads((TRANSFORMERS / "mha" / "config.json").read_text())
    with pytest.raises(ConfigurationError, match=message) as error:
        from_config({**config, **changes}, "weights/config.json")
    assert "weights/config.json" in str(error.value)


def test_what_config_json_cannot_say_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = small_model(window_pattern=(2, 3, -1))
    write_checkpoint(tmp_path / "a", Description(model=model, max_positions=9), values(random_params(model), model))
    with pytest.raises(ConfigurationError, match=r"window_pattern has windows of 2, 3.*knows one"):
        call(tmp_path / "a", tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()
    yarn = Yarn(factor=8, old_length=8192)
    slow = small_model(yarn=yarn, rope_theta=100.0)
    with pytest.raises(ConfigurationError, match="beta_slow"):
        to_config(Description(model=slow, max_positions=9), "float32")


# -- what does not fit


def damaged(tmp_path: Path, change: Any) -> str:
    folder = tmp_path / "damaged"
    shutil.copytree(TRANSFORMERS / "mha", folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_missing_unknown_and_mis_shaped_tensors_are_named_together(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.2.self_attn.k_norm.weight"]
        tensors["model.layers.0.input_layernorm.weight"] = np.ones(24, np.float32)
        tensors["model.layers.1.mlp.gate_proj.weights"] = tensors.pop("model.layers.1.mlp.gate_proj.weight")
        tensors["model.layers.3.mlp.down_proj.weight"] = np.ascontiguousarray(
            tensors["model.layers.3.mlp.down_proj.weight"].T
        )
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:60]
        tensors["model.norm.weight"] = np.ones(24, np.int32)

    with pytest.raises(ConfigurationError) as error:
        open_source(damaged(tmp_path, change))
    text = str(error.value)
    for part in (
        "its 47 tensors are not the 47 of this model",
        "model.layers.2.self_attn.k_norm.weight is missing, expected [24]",
        "model.layers.0.input_layernorm.weight [24] is no tensor of this model",
        "model.layers.1.mlp.gate_proj.weight is missing, expected [32, 24]",
        "model.layers.1.mlp.gate_proj.weights [32, 24] is no tensor of this model; "
        "did you mean model.layers.1.mlp.gate_proj.weight?",
        "model.layers.3.mlp.down_proj.weight is [32, 24], expected [24, 32]",
        "lm_head.weight is [60, 24], expected [64, 24] or [128, 24]",
        "model.norm.weight is I32, expected one of float32, bfloat16, float16",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-10], r"model\.safetensors is truncated: \d+ bytes, its header needs \d+"),
        (lambda data: data + b"1", "longer than its header says"),
        (lambda data: data[:4], "no safetensors file: it has 4 bytes"),
        (lambda data: b"\xff" * 8 + data[8:], "no safetensors file: a header of"),
        (lambda data: data[:8] + b"x" + data[9:], "malformed safetensors header"),
        (
            lambda data: data.replace(b'"shape":[24]', b'"shape":[23]', 1),
            r"takes 48 bytes, not those of bfloat16 \[23\]",
        ),
    ],
)
def test_a_damaged_file_is_named(change: Any, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(TRANSFORMERS / "mha", folder)
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ConfigurationError, match=message):
        open_source(str(folder))


def test_an_index_that_does_not_fit_its_files_is_named(tmp_path: Path) -> None:
    params = random_params(MODEL)
    writing.write_hugging_face(tmp_path, DESCRIPTION, values(params, MODEL), "float32", shard_bytes=3000)
    index = tmp_path / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    first = sorted(set(body["weight_map"].values()))[0]
    index.write_text(json.dumps({"weight_map": {**body["weight_map"], "lm_head.weight": first}}))
    with pytest.raises(ConfigurationError, match=f"{first} does not hold lm_head.weight"):
        open_source(str(tmp_path))
    index.write_text(json.dumps(body))
    (tmp_path / first).unlink()
    with pytest.raises(ConfigurationError, match=f"{first} is missing, which model.safetensors.index.json names"):
        open_source(str(tmp_path))


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", DESCRIPTION, values(random_params(MODEL), MODEL))
    other = DESCRIPTION.model_copy(update={"model": small_model(mlp_hidden=26)})
    with pytest.raises(ConfigurationError, match=r"w_gate is \[4, 16, 24\], expected \[4, 16, 26\]"):
        CheckpointSource(Folder(str(tmp_path / "a")), other)
    shutil.rmtree(tmp_path / "a" / "params.wk")
    with pytest.raises(ConfigurationError, match=r"wk is missing, expected \[4, 16, 16\]"):
        open_source(str(tmp_path / "a"))


def test_a_recipe_of_another_model_is_named(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"another model than recipe small: model\.vocab_size is 30, there it is 64"
    ):
        call(TRANSFORMERS / "mha", tmp_path / "x", "untildone", recipe=recipe)


def test_bad_requests(tmp_path: Path) -> None:
    mha = TRANSFORMERS / "mha"
    with pytest.raises(ConfigurationError, match="no weights known here"):
        call(tmp_path, tmp_path / "x", "hf")
    with pytest.raises(ConfigurationError, match=r"weights .*nowhere does not exist; give the folder"):
        call(tmp_path / "nowhere", tmp_path / "x", "hf")
    with pytest.raises(ConfigurationError, match="exists already"):
        call(mha, tmp_path, "hf")
    with pytest.raises(ConfigurationError, match="write to a folder on disk"):
        convert.run(str(mha), "gs://b/x", "hf", None, None, ())
    with pytest.raises(ConfigurationError, match="our checkpoints hold float32"):
        call(mha, tmp_path / "x", "untildone", "bfloat16")
    with pytest.raises(ConfigurationError, match="--set overrides fields of a recipe"):
        convert.run(str(mha), str(tmp_path / "x"), "hf", None, None, ("model.n_layers=2",))


def test_a_conversion_that_breaks_off_leaves_nothing_at_its_place(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(TRANSFORMERS / "olmo_core", broken)
    data = (broken / "__1_0.distcp").read_bytes()
    (broken / "__1_0.distcp").write_bytes(data[: len(data) // 2])
    gqa = open_source(str(TRANSFORMERS / "gqa")).description.model
    (tmp_path / "recipe.json").write_text(json.dumps(small_recipe(model=gqa).model_dump(mode="json")))
    for target in ("hf", "untildone"):
        with pytest.raises(ConfigurationError, match="ends before byte"):
            call(broken, tmp_path / target, target, recipe=str(tmp_path / "recipe.json"))
        assert not (tmp_path / target).exists()
