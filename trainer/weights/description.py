"""What a set of weights is besides its tensors: architecture, sequence length, special ids. To and from config.json.

The config.json is that of Olmo3ForCausalLM as transformers 4.57 writes it, which later ones read too. Transformers from
5.0 on applies YaRN to the windowed layers as well, which is wrong (transformers issue 45945 and vLLM issue 43419):
run stage 3 with 4.57, vLLM, llama.cpp or OLMo-core.
"""

import math
from typing import Any

from trainer.errors import ConfigurationError
from trainer.frozen import Frozen
from trainer.recipe import Model, Recipe, Yarn

PAD_TO = 128  # rows of the vocabulary in training are a multiple of this
DOLMA2 = (100_278, 100_257, 100_277)  # size, eos and pad of the tokenizer of OLMo 2 and 3
WINDOWED, FULL = "sliding_attention", "full_attention"
TRANSFORMERS = "4.57.6"


class Description(Frozen):
    """Enough to write any format from the tensors alone."""

    model: Model
    max_positions: int
    eos_id: int | None = None
    pad_id: int | None = None


def of_recipe(recipe: Recipe) -> Description:
    """The description of what `recipe` trains."""
    size, eos, pad = DOLMA2
    dolma2 = (recipe.model.vocab_size, recipe.data.eos_id) == (size, eos)
    return Description(
        model=recipe.model,
        max_positions=recipe.sequence_length,
        eos_id=recipe.data.eos_id,
        pad_id=pad if dolma2 else None,
    )


def to_config(description: Description, dtype: str) -> dict[str, Any]:
    """config.json. Raises ConfigurationError for what Olmo3ForCausalLM cannot express."""
    model = description.model
    windows = [model.window(i) for i in range(model.n_layers)]
    sizes = sorted({w for w in windows if w > 0})
    if len(sizes) > 1:
        raise ConfigurationError(
            f"model.window_pattern has windows of {', '.join(map(str, sizes))}; Hugging Face's config.json knows one"
        )
    config: dict[str, Any] = {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": description.eos_id,
        "hidden_act": "silu",
        "hidden_size": model.d_model,
        "initializer_range": model.init_std,
        "intermediate_size": model.mlp_hidden,
        "layer_types": [WINDOWED if w > 0 else FULL for w in windows],
        "max_position_embeddings": description.max_positions,
        "model_type": "olmo3",
        "num_attention_heads": model.n_heads,
        "num_hidden_layers": model.n_layers,
        "num_key_value_heads": model.n_kv_heads,
        "pad_token_id": description.pad_id,
        "rms_norm_eps": model.norm_eps,
        "rope_scaling": None if model.yarn is None else _rope_scaling(model, model.yarn),
        "rope_theta": model.rope_theta,
        # Without windowed layers no window is used; transformers still wants a number.
        "sliding_window": sizes[0] if sizes else description.max_positions,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformers_version": TRANSFORMERS,
        "use_cache": True,
        "vocab_size": model.vocab_size,
    }
    if model.head_dim * model.n_heads != model.d_model:
        config["head_dim"] = model.head_dim
    return config


def _rope_scaling(model: Model, yarn: Yarn) -> dict[str, Any]:
    turned = math.log(yarn.old_length / (yarn.beta_slow * 2 * math.pi)) / (2 * math.log(model.rope_theta))
    if math.ceil(model.head_dim * turned) > model.head_dim // 2 - 1:
        raise ConfigurationError(
            f"model.yarn: with old_length {yarn.old_length} and rope_theta {model.rope_theta:g} even the slowest pair of "
            "a head turns more often than beta_slow; OLMo-core, and we, then scale otherwise than Hugging Face does"
        )
    return {
        "attention_factor": yarn.attention_factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.old_length,
        "rope_type": "yarn",
    }


def different(ours: Model, theirs: Model) -> list[str]:
    """Where two architectures differ, one sentence per field; padding and initialiser are no part of the weights."""
    found = []
    for field in Model.model_fields:
        if field in ("padded_vocab_size", "init_std"):
            continue
        pair = getattr(ours, field), getattr(theirs, field)
        if field == "window_pattern":
            pair = tuple([m.window(i) for i in range(m.n_layers)] for m in (ours, theirs))
            if ours.n_layers != theirs.n_layers:
                continue
        if pair[0] != pair[1]:
            found.append(f"model.{field} is {pair[0]}, there it is {pair[1]}")
    return found


class _Config:
    """config.json with errors that name the field."""

    def __init__(self, body: dict[str, Any], source: str) -> None:
        self.body, self.source = body, source

    def number(self, field: str, default: float | None = None) -> float:
        value = self.body.get(field)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(field, value, "a number")
        return value

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.number(field, default)
        if value != int(value) or value <= 0:
            raise self.wrong(field, value, "a positive integer")
        return int(value)

    def same(self, field: str, expected: Any, default: Any) -> None:
        value = self.body.get(field, default)
        if value != expected:
            raise self.wrong(field, value, repr(expected))

    def wrong(self, field: str, value: Any, expected: str) -> ConfigurationError:
        return ConfigurationError(f"{self.source}: {field} is {value!r}, expected {expected}")


def from_config(body: dict[str, Any], source: str, padded_vocab_size: int | None = None) -> Description:
    """The description in a config.json; the vocabulary is padded to a multiple of 128 unless told otherwise.

    Raises ConfigurationError naming the field that is missing, or that this model cannot follow.
    """
    config = _Config(body, source)
    config.same("model_type", "olmo3", None)
    for field, expected in (("attention_bias", False), ("tie_word_embeddings", False), ("hidden_act", "silu")):
        config.same(field, expected, expected)
    n_layers, n_heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    d_model = config.integer("hidden_size")
    if body.get("head_dim") is None and d_model % n_heads:
        raise config.wrong("hidden_size", d_model, f"a multiple of num_attention_heads {n_heads}, or head_dim as well")
    vocab = config.integer("vocab_size")
    max_positions = config.integer("max_position_embeddings")
    theta, scaling = _rope(config)
    fields = {
        "vocab_size": vocab,
        "padded_vocab_size": padded_vocab_size or -(-vocab // PAD_TO) * PAD_TO,
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": config.integer("num_key_value_heads", n_heads),
        "head_dim": config.integer("head_dim", d_model // n_heads),
        "mlp_hidden": config.integer("intermediate_size"),
        "window_pattern": _windows(config, n_layers),
        "rope_theta": theta,
        "yarn": _yarn(config, scaling, max_positions),
        "norm_eps": config.number("rms_norm_eps"),
        "init_std": config.number("initializer_range", 0.02),
    }
    eos, pad = (body.get(f"{n}_token_id") for n in ("eos", "pad"))
    return Description(
        model=Model.parse(fields, source),
        max_positions=max_positions,
        eos_id=eos[0] if isinstance(eos, list) and eos else eos,
        pad_id=pad,
    )


def _windows(config: _Config, n_layers: int) -> tuple[int, ...]:
    types = config.body.get("layer_types")
    if types is None:  # as transformers fills it in
        types = [FULL if (i + 1) % 4 == 0 else WINDOWED for i in range(n_layers)]
    if not isinstance(types, list) or len(types) != n_layers or not set(types) <= {WINDOWED, FULL}:
        raise config.wrong("layer_types", types, f"{n_layers} times {WINDOWED!r} or {FULL!r}")
    if types[-1] != FULL:
        raise config.wrong("layer_types[-1]", types[-1], f"{FULL!r}: the last layer of OLMo 3 is full")
    window = config.integer("sliding_window") if WINDOWED in types else -1
    windows = [window if kind == WINDOWED else -1 for kind in types]
    repeats = (p for p in range(1, n_layers + 1) if all(windows[i] == windows[i % p] for i in range(n_layers)))
    return tuple(windows[: next(repeats)])


def _rope(config: _Config) -> tuple[float, dict[str, Any] | None]:
    """theta and the scaling of the full layers; transformers 5 keeps both in rope_parameters, perhaps per layer type."""
    parameters = config.body.get("rope_parameters")
    if parameters is None:
        return config.number("rope_theta"), config.body.get("rope_scaling")
    if not isinstance(parameters, dict):
        raise config.wrong("rope_parameters", parameters, "a mapping")
    full = parameters.get(FULL, parameters)
    if parameters.get(WINDOWED, {}).get("rope_type", "default") != "default":
        raise config.wrong("rope_parameters", parameters[WINDOWED], "no scaling on windowed layers")
    theta = full.get("rope_theta", config.body.get("rope_theta"))
    return _Config({"rope_parameters.rope_theta": theta}, config.source).number("rope_parameters.rope_theta"), full


def _yarn(config: _Config, scaling: dict[str, Any] | None, max_positions: int) -> dict[str, Any] | None:
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    if scaling is None or kind == "default":
        return None
    if kind != "yarn":
        raise config.wrong("rope_scaling.rope_type", kind, "'yarn'")
    for field in ("mscale", "mscale_all_dim"):
        if scaling.get(field) is not None:
            raise config.wrong(f"rope_scaling.{field}", scaling[field], "none")
    if scaling.get("truncate", True) is not True:
        raise config.wrong("rope_scaling.truncate", scaling["truncate"], "True")
    part = _Config(scaling, f"{config.source} rope_scaling")
    factor = part.number("factor")
    made = {
        "factor": factor,
        "old_length": part.integer("original_max_position_embeddings", max_positions),
        "beta_fast": part.number("beta_fast", 32),
        "beta_slow": part.number("beta_slow", 1),
    }
    wanted = Yarn.parse(made, part.source).attention_factor
    if abs(part.number("attention_factor", wanted) - wanted) > 1e-6:
        raise part.wrong("attention_factor", scaling["attention_factor"], f"{wanted} = 0.1 ln(factor) + 1")
    return made
