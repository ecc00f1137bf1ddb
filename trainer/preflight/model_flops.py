"""What one optimizer step has to compute, by the reference's count: nothing of it depends on the program. No JAX."""

from trainer.recipe import Model, Recipe


def parameters(model: Model) -> int:
    """All parameters, the embedding and the rows that only pad the vocabulary included."""
    attention = model.d_model * model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads)
    norms = 2 * model.d_model + model.head_dim * (model.n_heads + model.n_kv_heads)
    layer = attention + 3 * model.d_model * model.mlp_hidden + norms
    return 2 * model.padded_vocab_size * model.d_model + model.n_layers * layer + model.d_model


def attention_pairs(model: Model, length: int) -> int:
    """Pairs of a query and a key that it sees, over all layers, for one sequence and one head."""
    total = 0
    for layer in range(model.n_layers):
        window = model.window(layer)
        seen = length if window < 0 else min(window, length)
        total += seen * (seen + 1) // 2 + (length - seen) * seen
    return total


def model_flops(recipe: Recipe) -> int:
    """FLOPs of one step, as MaxText counts them: 6 per parameter and token, 12 per pair and head dimension."""
    model, length = recipe.model, recipe.sequence_length
    weights = 6 * parameters(model) * length
    attention = 12 * attention_pairs(model, length) * model.n_heads * model.head_dim
    return recipe.global_batch * (weights + attention)
