"""A comparison as a table and as a plot."""

from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import ConfigurationError
from trainer.parity.compare import DIVERGED, Comparison


def table(result: Comparison, about: dict[str, Any], problems: list[str]) -> str:
    """What a person reads."""
    body = result.to_json()
    ends = result.layers[-1]
    worst = int(np.argmax(result.layers))
    if result.first_divergence is None:
        layers = f"none (largest relative error {result.layers[worst]:.2e}, at {_layer(worst)})"
    else:
        first = result.first_divergence
        layers = (
            f"{_layer(first)} ({result.layers[first]:.2e}; limit {DIVERGED[result.dtype]:.0e}; last layer {ends:.2e})"
        )
    rows = [
        ("reference", f"{about['hf']} (transformers {about['transformers']}, torch {about['torch']})"),
        ("ours", about["ours"]),
        ("tokens", f"{about['rows']} × {about['length']}, computed in {result.dtype}"),
        ("KL mean / p99 / max", f"{body['kl_mean']:.3e} / {body['kl_p99']:.3e} / {body['kl_max']:.3e}"),
        ("top-1 agreement", f"{body['top1']:.4%}"),
        ("largest logit difference", f"{body['largest_logit_difference']:.3e}"),
        ("next-token CE", f"reference {body['ce_reference']:.6f}, ours {body['ce_ours']:.6f}"),
        ("first divergence", layers),
        ("limits", f"mean KL < {result.max_kl:.3g}, top-1 ≥ {result.min_top1:.4%}"),
        ("result", "passed" if not problems else "; ".join(problems)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _layer(i: int) -> str:
    return "the embeddings" if i == 0 else f"layer {i - 1}"


def draw(result: Comparison, about: dict[str, Any], path: Path) -> None:
    """KL per position, and relative error per layer. Raises ConfigurationError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        raise ConfigurationError("--plot needs matplotlib; install untildone[report]") from None

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    # An equal pair's KL is zero but for rounding, which may be negative: no place for it on the axis.
    kl, layers = np.asarray(result.kl).reshape(about["rows"], about["length"]), np.asarray(result.layers)
    left.semilogy(np.where(kl > 0, kl, np.nan).T, ".", markersize=2, alpha=0.4)
    left.axhline(result.max_kl, color="tab:red", linewidth=1, label=f"limit of the mean, {result.max_kl:.3g}")
    left.axhline(kl.mean(), color="black", linewidth=1, label=f"mean, {kl.mean():.3g}")
    left.set(xlabel="position", ylabel="KL(reference ‖ ours), nats", title="Predictions")
    left.legend()
    right.semilogy(np.where(layers > 0, layers, np.nan), "o-", markersize=3)
    right.axhline(DIVERGED[result.dtype], color="tab:red", linewidth=1, label="more than rounding")
    right.set(xlabel="layer's output (0: embeddings)", ylabel="largest relative error", title="Hidden states")
    right.legend()
    figure.suptitle(f"{about['ours']} beside {about['hf']}, {result.dtype}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
