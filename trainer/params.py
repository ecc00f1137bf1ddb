"""The parameters of OLMo 3: name, shape, axes, initialiser and foreign names of each, in one place. Importable without JAX."""

from functools import lru_cache
from typing import Literal, NamedTuple

from trainer.recipe import Model


class ParamSpec(NamedTuple):
    """One parameter: everything about it in one place.

    `axes` names each dimension of `shape`; "layer" is the leading one of what every layer has. `hf` and `olmo_core` are
    the names in Hugging Face's Olmo3ForCausalLM and in OLMo-core, {i} being the layer. Projections are [in, out] here
    and [out, in] there.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["truncated_normal", "ones"]
    hf: str
    olmo_core: str


_LAYER_HF, _LAYER_OLMO_CORE = "model.layers.{{i}}.{}.weight", "blocks.{{i}}.{}.weight"


def param_specs(model: Model) -> dict[str, ParamSpec]:
    """The parameters by name, in the order of the forward pass. The names are the keys of the params pytree."""
    d, f, v = model.d_model, model.mlp_hidden, model.padded_vocab_size
    q, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim

    def matrix(rows: tuple[str, int], columns: tuple[str, int], hf: str, olmo_core: str) -> ParamSpec:
        shape, axes = (model.n_layers, rows[1], columns[1]), ("layer", rows[0], columns[0])
        return ParamSpec(shape, axes, "truncated_normal", _LAYER_HF.format(hf), _LAYER_OLMO_CORE.format(olmo_core))

    def norm(width: int, hf: str, olmo_core: str) -> ParamSpec:
        shape, axes = (model.n_layers, width), ("layer", "norm")
        return ParamSpec(shape, axes, "ones", _LAYER_HF.format(hf), _LAYER_OLMO_CORE.format(olmo_core))

    return {
        "embedding": ParamSpec(
            (v, d), ("vocab", "embed"), "truncated_normal", "model.embed_tokens.weight", "embeddings.weight"
        ),
        "wq": matrix(("embed", d), ("heads", q), "self_attn.q_proj", "attention.w_q"),
        "wk": matrix(("embed", d), ("kv_heads", kv), "self_attn.k_proj", "attention.w_k"),
        "wv": matrix(("embed", d), ("kv_heads", kv), "self_attn.v_proj", "attention.w_v"),
        "q_norm": norm(q, "self_attn.q_norm", "attention.q_norm"),
        "k_norm": norm(kv, "self_attn.k_norm", "attention.k_norm"),
        "wo": matrix(("heads", q), ("embed", d), "self_attn.o_proj", "attention.w_out"),
        "attention_norm": norm(d, "post_attention_layernorm", "attention_norm"),
        "w_gate": matrix(("embed", d), ("mlp", f), "mlp.gate_proj", "feed_forward.w1"),
        "w_up": matrix(("embed", d), ("mlp", f), "mlp.up_proj", "feed_forward.w3"),
        "w_down": matrix(("mlp", f), ("embed", d), "mlp.down_proj", "feed_forward.w2"),
        "mlp_norm": norm(d, "post_feedforward_layernorm", "feed_forward_norm"),
        "norm": ParamSpec((d,), ("norm",), "ones", "model.norm.weight", "lm_head.norm.weight"),
        "head": ParamSpec((d, v), ("embed", "vocab"), "truncated_normal", "lm_head.weight", "lm_head.w_out.weight"),
    }


@lru_cache
def param_count(model: Model) -> int:
    """Number of parameters, padding rows included."""
    total = 0
    for spec in param_specs(model).values():
        size = 1
        for n in spec.shape:
            size *= n
        total += size
    return total
