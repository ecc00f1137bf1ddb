"""How many floating-point operations a token costs in training: the numerator of MFU, in three ways of counting.

All count 6 per weight that a token is multiplied with (2 forward, 4 backward) and no recomputation; the embedding is a
look-up. They differ in the pairs of positions whose scores count, 12 · heads · head_dim each:

    causal   the pairs that attention has to compute, causal mask and window. What this trainer reports, and what
             OLMo-core counts since 3.0. OLMo 3 7B at 8,192: 46.6 GFLOP
    window   min(window, length) per position, mask or not: OLMo-core in 2025, when OLMo 3 was trained. 49.4 GFLOP
    full     every pair, as the PaLM paper (arXiv 2204.02311, appendix B) counts. 54.2 GFLOP
"""

from typing import Literal, get_args

from trainer.recipe import Model

Counting = Literal["causal", "window", "full"]
COUNTINGS: tuple[Counting, ...] = get_args(Counting)
REPORTED: Counting = "causal"  # the MFU of progress.json and of progress lines


def flops_per_token(model: Model, length: int, counting: Counting = REPORTED) -> float:
    """FLOP of forward and backward per token of an instance of `length` tokens."""
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    attention = 2 * model.d_model * (heads + kv_heads) + heads + kv_heads  # four matrices and the two norms
    layer = attention + 3 * model.d_model * model.mlp_hidden
    weights = model.n_layers * layer + model.d_model * (model.padded_vocab_size + 1)
    keys = sum(keys_seen(model.window(layer), length, counting) for layer in range(model.n_layers))
    return 6 * weights + 12 * heads * keys


def keys_seen(window: int, length: int, counting: Counting) -> float:
    """Positions that one position looks at, on average; `window` counts itself, and is not positive for none."""
    seen = min(window, length) if window > 0 else length
    if counting == "causal":  # 1, 2, …, seen, and then always seen
        return (seen * (seen + 1) / 2 + (length - seen) * seen) / length
    return seen if counting == "window" else length
