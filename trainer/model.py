"""OLMo 3 at any size, as pure functions over a plain pytree of arrays (arXiv 2512.13961, table 33; OLMo-core).

Reordered norm (RMSNorm on the outputs of attention and MLP, none on their inputs), RMSNorm of queries and keys over the
full projection before the split into heads, three windowed layers to one full, rotary positions, SwiGLU, untied head,
no biases. Nothing here knows about devices: whoever runs the model on several passes `Weights` that fetch parameters.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from trainer import tensor
from trainer.attention import KEPT_BY_ATTENTION, PLAIN, Attention
from trainer.loss import head_loss
from trainer.norm import rms_norm
from trainer.params import param_specs
from trainer.plan import Remat
from trainer.recipe import Model
from trainer.rope import Rope, rope_table

Params = dict[str, jax.Array]


def init_params(model: Model, seed: int) -> Params:
    """Float32 parameters: truncated normal (cut at ±3σ) and ones. Each depends on its name and the seed alone.

    Threefry is counter based, so that under jit any sharding of the result gives the same bits.
    """
    params = {}
    for name, spec in param_specs(model).items():
        if spec.init == "ones":
            params[name] = jnp.ones(spec.shape, jnp.float32)
        else:
            key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), zlib.crc32(name.encode()))
            params[name] = model.init_std * jax.random.truncated_normal(key, -3.0, 3.0, spec.shape, jnp.float32)
    return params


@dataclass(frozen=True)
class Weights:
    """How the model gets at a parameter, where its gradient goes, and which attention kernel it runs.

    `fetch(name, value)` gives the whole parameter to compute with, `reduce(name, gradient)` what autodiff returns for
    `value`; neither is differentiated through. The last two dimensions of `value` are the parameter's own, as whole
    stacks and slices of them are fetched. The defaults are one device's: nothing to do.
    """

    compute_dtype: jnp.dtype
    fetch: Callable[[str, jax.Array], jax.Array] = lambda name, value: value
    reduce: Callable[[str, jax.Array], jax.Array] = lambda name, gradient: gradient
    attend: Attention = PLAIN
    tensor: int = 1  # devices that divide heads and MLP among them (trainer.tensor)
    refetch: bool = False  # fetch again in the backward pass instead of keeping whole parameters until then
    scanned: bool = False  # the passes are two loops

    def get(self, name: str, value: jax.Array) -> jax.Array:
        """The parameter in the compute dtype, its gradient reduced in float32.

        A norm's is multiplied in float32, so it is rounded to the compute dtype and widened again: as under FSDP in
        OLMo-core, and what trains in bfloat16 is what its bfloat16 export computes.
        """
        dtype = jnp.float32 if name.endswith("norm") else self.compute_dtype

        @jax.custom_vjp
        def get(value: jax.Array) -> jax.Array:
            return self.fetch(name, value.astype(self.compute_dtype).astype(dtype))

        get.defvjp(lambda v: (get(v), None), lambda _, g: (self.reduce(name, g.astype(jnp.float32)),))
        return get(value)

    def lookup(self, name: str, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Rows `ids` of the table. The gradients of one id's many occurrences are added in float32."""
        rows = table.shape

        @jax.custom_vjp
        def lookup(table: jax.Array) -> jax.Array:
            return self.fetch(name, table.astype(self.compute_dtype))[ids]

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            whole = self.whole_shape(name, rows)
            return (self.reduce(name, jnp.zeros(whole, jnp.float32).at[ids].add(gradient.astype(jnp.float32))),)

        lookup.defvjp(lambda t: (lookup(t), None), backward)
        return lookup(table)

    def matmul(self, x: jax.Array, named: dict[str, jax.Array]) -> list[jax.Array]:
        """x [..., in] times each of the parameters [in, out]; the gradient of x is summed over them in float32.

        The gradient of a parameter leaves its product in float32: it is never rounded to the compute dtype before it is
        summed over micro-batches and devices.
        """
        return self.matmul_of(lambda x: x, (x,), named)

    def matmul_of(
        self, make: Callable[..., jax.Array], made_of: tuple[jax.Array, ...], named: dict[str, jax.Array]
    ) -> list[jax.Array]:
        """`matmul` of make(*made_of), which is cheap: the backward pass keeps `made_of` and makes it again."""
        names = list(named)

        def whole(values: list[jax.Array]) -> list[jax.Array]:
            return [self.fetch(n, v.astype(self.compute_dtype)) for n, v in zip(names, values, strict=True)]

        def multiplied(made_of: tuple[jax.Array, ...], matrices: list[jax.Array]) -> list[jax.Array]:
            x = make(*made_of)
            rows = x.reshape(-1, x.shape[-1])
            return [(rows @ matrix).reshape(*x.shape[:-1], -1) for matrix in matrices]

        @jax.custom_vjp
        def products(made_of: tuple[jax.Array, ...], values: list[jax.Array]) -> list[jax.Array]:
            return multiplied(made_of, whole(values))

        def forward(made_of: tuple[jax.Array, ...], values: list[jax.Array]) -> tuple[list[jax.Array], Any]:
            matrices = whole(values)
            return multiplied(made_of, matrices), (made_of, values if self.refetch else matrices)

        def backward(kept: Any, gradients: list[jax.Array]) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
            made_of, matrices = kept
            if self.refetch:
                # The barrier keeps XLA from reusing what the forward pass fetched, which would keep it in memory. In a loop of
                # its own the backward pass cannot, and is not to wait for gradients before it fetches; but these are to be
                # computed once for all products that read them.
                if self.scanned:
                    values, gradients = matrices, jax.lax.optimization_barrier(gradients)
                else:
                    values, gradients = jax.lax.optimization_barrier((matrices, gradients))
                matrices = whole(values)
            x, made_back = jax.vjp(make, *made_of)
            rows, flat = x.reshape(-1, x.shape[-1]), [g.reshape(-1, g.shape[-1]) for g in gradients]
            d_rows = _sum_of_products(flat, matrices)
            if self.refetch:
                # What is computed of it afterwards is not to be done tile by tile within the product, which costs more.
                d_rows = jax.lax.optimization_barrier(d_rows)
            d_values = [
                jax.lax.dot_general(rows, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32) for g in flat
            ]
            return made_back(d_rows.reshape(x.shape)), [self.reduce(n, d) for n, d in zip(names, d_values, strict=True)]

        products.defvjp(forward, backward)
        return products(made_of, list(named.values()))

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the parameter after `fetch`."""
        return jax.eval_shape(partial(self.fetch, name), jax.ShapeDtypeStruct(shape, jnp.float32)).shape


def _sum_of_products(rows: list[jax.Array], matrices: list[jax.Array]) -> jax.Array:
    """Σ rows · matrixᵀ, added in float32 and rounded once."""
    dims = (((1,), (1,)), ((), ()))
    if len(rows) == 1:
        return jax.lax.dot_general(rows[0], matrices[0], dims)
    parts = [
        jax.lax.dot_general(r, m, dims, preferred_element_type=jnp.float32) for r, m in zip(rows, matrices, strict=True)
    ]
    return sum(parts[1:], parts[0]).astype(rows[0].dtype)


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) · up in float32, rounded once. The backward pass keeps the two inputs and nothing wider."""
    wide = gate.astype(jnp.float32)
    return (jax.nn.silu(wide) * up.astype(jnp.float32)).astype(gate.dtype)


def _swiglu_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate, up, g = (x.astype(jnp.float32) for x in (*kept, gradient))
    sigmoid = jax.nn.sigmoid(gate)
    d_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    return d_gate.astype(gradient.dtype), (g * gate * sigmoid).astype(gradient.dtype)


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


def layer(
    x: jax.Array,
    w: Params,
    rope: Rope,
    model: Model,
    window: int,
    weights: Weights,
    documents: jax.Array | None = None,
    remat: Remat = "none",
) -> jax.Array:
    """One layer over x [batch, length, d_model]; `w` holds this layer's parameters as they are stored."""
    eps = model.norm_eps

    def norm(x: jax.Array, name: str) -> jax.Array:
        return rms_norm(x, weights.get(name, w[name]), eps)

    def matmul(x: jax.Array, *names: str) -> list[jax.Array]:
        return weights.matmul(x, {name: w[name] for name in names})

    q, k, v = matmul(x, "wq", "wk", "wv")
    q_norm, k_norm = (tensor.part(weights.get(name, w[name]), weights.tensor, 0) for name in ("q_norm", "k_norm"))

    def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # 1/√head_dim goes into q's rotation, in float32: multiplied in afterwards, it would round q once more.
        cos, sin = rope
        scaled = cos / math.sqrt(model.head_dim), sin / math.sqrt(model.head_dim)
        q = weights.attend.norm_rope(q, q_norm, scaled, model.head_dim, eps)
        k = weights.attend.norm_rope(k, k_norm, rope, model.head_dim, eps)
        return weights.attend.attention(q, k, v, documents, model.head_dim, window)

    if weights.attend.turn_again:
        # The barriers against common subexpressions are not needed in a scan, whose two passes are two loops.
        kept = jax.checkpoint_policies.save_only_these_names(*KEPT_BY_ATTENTION)
        attended = jax.checkpoint(attended, policy=kept, prevent_cse=False)
    context = attended(q, k, v)
    x = x + norm(tensor.total(matmul(context, "wo")[0], weights.tensor), "attention_norm")

    def mlp(x: jax.Array) -> jax.Array:
        gate, up = matmul(x, "w_gate", "w_up")
        return tensor.total(weights.matmul_of(swiglu, (gate, up), {"w_down": w["w_down"]})[0], weights.tensor)

    if remat == "mlp":
        mlp = jax.checkpoint(mlp)
    return x + norm(mlp(x), "mlp_norm")


def window_period(model: Model) -> tuple[int, ...]:
    """The shortest run of windows that, repeated, gives every layer's; all layers' when there is none shorter."""
    windows = tuple(model.window(i) for i in range(model.n_layers))
    for period in range(1, model.n_layers):
        if model.n_layers % period == 0 and windows == windows[:period] * (model.n_layers // period):
            return windows[:period]
    return windows


def hidden_states(
    params: Params,
    tokens: jax.Array,
    model: Model,
    weights: Weights,
    remat: Remat = "none",
    documents: jax.Array | None = None,
) -> jax.Array:
    """The normed output of the last layer [batch, length, d_model], in the compute dtype; tokens int32 [batch, length].

    Where devices share a sequence, `tokens` are this one's part, `documents` those of whole sequences.
    `documents` int32 [batch, length] keeps attention within equal numbers. Positions need no restart at a document's
    beginning: attention sees their differences only. Compiles one copy of the repeating window pattern and scans over it.
    """
    x = weights.lookup("embedding", params["embedding"], tokens)
    period = window_period(model)
    length = tokens.shape[1] * weights.attend.devices

    def rope(window: int) -> Rope:
        tables = rope_table(length, model.head_dim, model.rope_theta, model.yarn if window < 0 else None)
        cos, sin = (weights.attend.part(table, 0) for table in tables)
        return cos, sin

    ropes = {window: rope(window) for window in set(period)}
    repeats = model.n_layers // len(period)
    weights = replace(weights, scanned=repeats > 1)
    stacks = {name: params[name] for name, spec in param_specs(model).items() if spec.axes[0] == "layer"}

    def one(x: jax.Array, w: Params, window: int) -> jax.Array:
        return layer(x, w, ropes[window], model, window, weights, documents, remat)

    if remat == "full":
        one = jax.checkpoint(one, static_argnums=(2,))

    def pattern(x: jax.Array, group: Params) -> tuple[jax.Array, None]:
        for i, window in enumerate(period):
            x = one(x, {name: value[i] for name, value in group.items()}, window)
        return x, None

    if repeats == 1:
        x, _ = pattern(x, stacks)
    else:
        groups = {name: s.reshape(repeats, len(period), *s.shape[1:]) for name, s in stacks.items()}
        x, _ = jax.lax.scan(pattern, x, groups)
    return rms_norm(x, weights.get("norm", params["norm"]), model.norm_eps)


def forward(params: Params, tokens: jax.Array, model: Model, compute_dtype: str | jnp.dtype) -> jax.Array:
    """Float32 logits [batch, length, padded_vocab_size] for tokens int32 [batch, length]."""
    weights = Weights(jnp.dtype(compute_dtype))
    hidden = hidden_states(params, tokens, model, weights)
    return jnp.dot(hidden, weights.get("head", params["head"]), preferred_element_type=jnp.float32)


def next_token_loss(
    params: Params,
    tokens: jax.Array,
    model: Model,
    weights: Weights,
    z_loss: float,
    remat: Remat = "none",
    has_target: jax.Array | None = None,
    documents: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(objective, ce) of predicting each token from those before it: sums over the batch, not means.

    `objective` f32 [] is Σ (CE + z_loss·logsumexp²) over the targets, `ce` f32 [batch] Σ CE per row. Tokens int32
    [batch, length]; `has_target` f32 [batch, length] is 1 where the next token is to be predicted, by default everywhere
    but at the last position. `documents` as in `hidden_states`. Where devices share a sequence, all are given whole, and
    the sums are over this one's part; where they divide heads among them, over its share of the tokens.
    """
    batch, length = tokens.shape
    targets = jnp.roll(tokens, -1, axis=1)
    if has_target is None:
        has_target = jnp.broadcast_to(jnp.arange(length) < length - 1, (batch, length)).astype(jnp.float32)
    tokens, targets, has_target = (weights.attend.part(x, 1) for x in (tokens, targets, has_target))
    hidden = hidden_states(params, tokens, model, weights, remat, documents)
    flat = hidden.reshape(tokens.size, -1)
    head = weights.get("head", params["head"])
    share = [tensor.part(x, weights.tensor, 0) for x in (flat, targets.reshape(-1), has_target.reshape(-1))]
    objective, ce = head_loss(share[0], head, *share[1:], z_loss)
    return objective, tensor.placed(ce, weights.tensor).reshape(tokens.shape).sum(axis=1)
