"""Heads and the hidden width of the MLP divided over devices: tensor parallelism as in Megatron-LM (arXiv 1909.08053).

What is as wide as the model is the same on the devices of a group; of what is as wide as all heads, or as the MLP, each
has its part. The products that lead back (wo, w_down) give each device a part of the sum, which is then summed.

Gradients of what is the same everywhere are left as parts, whose sum over the group is the gradient: all that lies
between two sums is linear in them. So the transpose of a sum is a sum, and nothing else has to be exchanged. The loss
is taken in parts as well: each device takes its share of the tokens to the whole head.
"""

import jax

AXIS = "tensor"  # of the mesh; inside a shard_map over it
CUT = ("heads", "kv_heads", "mlp")  # axes of parameters (trainer.params) that are divided


def part(x: jax.Array, count: int, axis: int) -> jax.Array:
    """Of x, this device's share along `axis`, one of `count` equal ones."""
    if count == 1:
        return x
    size = x.shape[axis] // count
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * size, size, axis)


def placed(x: jax.Array, count: int) -> jax.Array:
    """x [n] where `part` took it from [n · count], with zeros around it."""
    if count == 1:
        return x
    whole = jax.numpy.zeros((x.shape[0] * count,), x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, x, jax.lax.axis_index(AXIS) * x.shape[0], 0)


def total(x: jax.Array, count: int) -> jax.Array:
    """The sum of what the devices of a group have; so is its transpose."""
    return x if count == 1 else jax.lax.psum(x, AXIS)
