"""What one optimizer step has to compute, by the reference's count: nothing of it depends on the program. No JAX."""

from trainer.flops import keys_seen
from trainer.params import param_count
from trainer.recipe import Model, Recipe


def attention_pairs(model: Model, length: int) -> int:
    """Pairs of a query and a key that it sees, over all layers, for one sequence and one head."""
    return round(length * sum(keys_seen(model.window(layer), length, "causal") for layer in range(model.n_layers)))


def model_flops(recipe: Recipe) -> int:
    """FLOPs of one step, as MaxText counts them: 6 per parameter and token, 12 per pair and head dimension."""
    model, length = recipe.model, recipe.sequence_length
    weights = 6 * param_count(model) * length
    attention = 12 * attention_pairs(model, length) * model.n_heads * model.head_dim
    return recipe.global_batch * (weights + attention)
