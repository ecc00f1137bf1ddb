"""OLMo 3 in plain numpy, float64, one position at a time where that is the plainest: the yardstick of tests."""

import numpy as np

from trainer.recipe import Model, Yarn

Array = np.ndarray


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rope(x: Array, theta: float, yarn: Yarn | None = None) -> Array:
    """x [length, heads, d] as complex numbers first half + i·second half, turned by position · theta^(-2i/d)."""
    length, _, d = x.shape
    z = x[..., : d // 2] + 1j * x[..., d // 2 :]
    speed = theta ** (-2 * np.arange(d // 2) / d)
    if yarn is not None:
        turns = [
            d * np.log(yarn.old_length / 2 / np.pi / beta) / 2 / np.log(theta)
            for beta in (yarn.beta_fast, yarn.beta_slow)
        ]
        low, high = max(np.floor(turns[0]), 0), min(np.ceil(turns[1]), d // 2 - 1)
        for i in range(d // 2):
            ramp = min(max((i - low) / max(high - low, 1e-3), 0), 1)
            speed[i] = ramp * speed[i] / yarn.factor + (1 - ramp) * speed[i]
        z = z * (0.1 * np.log(yarn.factor) + 1)
    z = z * np.exp(1j * np.arange(length)[:, None] * speed)[:, None, :]
    return np.concatenate([z.real, z.imag], axis=-1)


def attention(q: Array, k: Array, v: Array, window: int) -> Array:
    """q [length, heads, d], k and v [length, kv_heads, d]: one query of one head at a time."""
    length, heads, d = q.shape
    group = heads // k.shape[1]
    out = np.zeros_like(q)
    for t in range(length):
        first = 0 if window < 0 else max(0, t + 1 - window)
        for h in range(heads):
            scores = k[first : t + 1, h // group] @ q[t, h] / np.sqrt(d)
            p = np.exp(scores - scores.max())
            out[t, h] = (p / p.sum()) @ v[first : t + 1, h // group]
    return out


def logits(params: dict[str, Array], tokens: Array, model: Model) -> Array:
    """[length, padded_vocab_size] for tokens [length]."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    x, eps, length = p["embedding"][tokens], model.norm_eps, len(tokens)
    for i in range(model.n_layers):
        q = rms_norm(x @ p["wq"][i], p["q_norm"][i], eps).reshape(length, model.n_heads, model.head_dim)
        k = rms_norm(x @ p["wk"][i], p["k_norm"][i], eps).reshape(length, model.n_kv_heads, model.head_dim)
        v = (x @ p["wv"][i]).reshape(length, model.n_kv_heads, model.head_dim)
        window = -1 if i == model.n_layers - 1 else model.window_pattern[i % len(model.window_pattern)]
        yarn = model.yarn if window < 0 else None
        a = attention(rope(q, model.rope_theta, yarn), rope(k, model.rope_theta, yarn), v, window).reshape(length, -1)
        x = x + rms_norm(a @ p["wo"][i], p["attention_norm"][i], eps)
        gate = x @ p["w_gate"][i]
        m = (gate / (1 + np.exp(-gate)) * (x @ p["w_up"][i])) @ p["w_down"][i]
        x = x + rms_norm(m, p["mlp_norm"][i], eps)
    return rms_norm(x, p["norm"], eps) @ p["head"]


def cross_entropy(z: Array, tokens: Array) -> tuple[float, float]:
    """Σ CE and Σ logsumexp² over the targets tokens[1:] for logits z [length, vocab]."""
    lse = np.log(np.exp(z[:-1]).sum(-1))
    return float((lse - z[np.arange(len(tokens) - 1), tokens[1:]]).sum()), float((lse**2).sum())
