"""Our model run layer by layer, on one device, with one layer's weights in memory: a 7B fits beside a small accelerator.

It is `trainer.model.layer`, the function that trains, and the head as `trainer.model.forward` computes it.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from trainer.model import Weights, layer
from trainer.norm import rms_norm
from trainer.params import param_specs
from trainer.rope import rope_table
from trainer.splash import attention_for
from trainer.weights.slots import Slot, slots
from trainer.weights.sources import Source

LOGITS = 2**26  # elements of the logits computed at once: 256 MiB


class Layerwise:
    """A model whose weights are read when they are needed. `dtype`: what it computes in."""

    def __init__(self, source: Source, dtype: str) -> None:
        self.source, self.model = source, source.description.model
        # Left alone, accelerators multiply float32 with fewer digits.
        self._precision = "highest" if dtype == "float32" else "default"
        self._weights = Weights(jnp.dtype(dtype), attend=attention_for(jax.devices()[0].platform))
        self._specs = param_specs(self.model)
        self._layers: dict[int, list[Slot]] = {}
        self._others: dict[str, Slot] = {}
        for slot in slots(self.model):
            if slot.layer is None:
                self._others[slot.parameter] = slot
            else:
                self._layers.setdefault(slot.layer, []).append(slot)

    def hidden(self, tokens: np.ndarray) -> Iterator[jax.Array]:
        """[rows, length, d_model] in the compute dtype: the embeddings, then what each layer hands on.

        tokens int32 [rows, length].
        """
        model, dtype = self.model, self._weights.compute_dtype
        x = jnp.asarray(self.source.read(self._others["embedding"])[tokens], dtype)
        yield x
        windows = {model.window(i) for i in range(model.n_layers)}
        yarn = {w: model.yarn if w < 0 else None for w in windows}
        ropes = {w: rope_table(tokens.shape[1], model.head_dim, model.rope_theta, yarn[w]) for w in windows}
        steps = {
            w: jax.jit(partial(layer, rope=ropes[w], model=model, window=w, weights=self._weights)) for w in windows
        }
        for i in range(model.n_layers):
            # In the compute dtype already: half the memory, and the same bits that the model casts to.
            w = {
                slot.parameter: jnp.asarray(
                    self.source.read(slot), jnp.float32 if slot.parameter.endswith("norm") else dtype
                )
                for slot in self._layers[i]
            }
            step = steps[model.window(i)]
            with jax.default_matmul_precision(self._precision):
                x = jnp.concatenate([step(x[row : row + 1], w) for row in range(len(tokens))])
            yield x

    def logits(self, last: jax.Array) -> Iterator[tuple[int, int, np.ndarray]]:
        """(row, first position, float32 [n, vocab_size]) from the last layer's output, in pieces."""
        norm = self._weights.get("norm", jnp.asarray(self.source.read(self._others["norm"])))
        head = jnp.asarray(self.source.read(self._others["head"])[:, : self.model.vocab_size], last.dtype)

        @jax.jit
        def of(x: jax.Array, head: jax.Array) -> jax.Array:
            return jnp.dot(rms_norm(x, norm, self.model.norm_eps), head, preferred_element_type=jnp.float32)

        length = last.shape[1]
        piece = max(1, min(length, LOGITS // self.model.vocab_size))
        for row in range(len(last)):
            for first in range(0, length, piece):
                with jax.default_matmul_precision(self._precision):
                    part = of(last[row, first : first + piece], head)
                yield row, first, np.asarray(part)
