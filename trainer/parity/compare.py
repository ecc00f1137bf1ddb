"""How far two models' predictions lie apart: per position in float64, summed up in one result."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

# What a right implementation stays below. bf16: the public reproduction of OLMo 3 7B against Hugging Face at 8,192
# tokens. Float32: off by rounding alone, which among thousands of positions may decide a tie.
LIMITS = {"float32": (1e-9, 0.999), "bfloat16": (1.5e-3, 0.9875)}
# Relative error of a layer's output that rounding alone does not reach.
DIVERGED = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass
class Comparison:
    """The reference is the left side: KL(reference ‖ ours), in nats."""

    dtype: str
    max_kl: float
    min_top1: float
    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)
    difference: float = 0.0
    ce: list[tuple[float, float]] = field(default_factory=list)  # (reference, ours) of the next token
    layers: list[float] = field(default_factory=list)  # relative error: the embeddings, then each layer

    def add_layer(self, reference: np.ndarray, ours: np.ndarray) -> None:
        """The outputs of the next layer, float32 [rows, length, width]."""
        wide = reference.astype(np.float64)
        norms = np.linalg.norm(wide, axis=-1)
        errors = np.linalg.norm(wide - ours, axis=-1)
        self.layers.append(float(np.max(errors / np.maximum(norms, 1e-30))))

    def add_logits(self, reference: np.ndarray, ours: np.ndarray, targets: np.ndarray) -> None:
        """Logits float32 [n, vocabulary] of n positions in a row and their next tokens [≤ n]."""
        p, q = _log_softmax(reference), _log_softmax(ours)
        # Rounding makes an equal pair's sum a little negative or positive, in the order of 1e-16.
        self.kl += np.sum(np.exp(p) * (p - q), axis=-1).tolist()
        self.agree += (np.argmax(reference, -1) == np.argmax(ours, -1)).tolist()
        self.difference = max(self.difference, float(np.max(np.abs(reference.astype(np.float64) - ours))))
        at = np.arange(len(targets))
        self.ce += list(zip((-p[at, targets]).tolist(), (-q[at, targets]).tolist(), strict=True))

    @property
    def first_divergence(self) -> int | None:
        """The first layer whose output rounding does not explain: 0 for the embeddings, then layers from 1."""
        return next((i for i, error in enumerate(self.layers) if not error < DIVERGED[self.dtype]), None)

    def problems(self) -> list[str]:
        """Which limits are broken."""
        body, found = self.to_json(), []
        if not body["kl_mean"] < self.max_kl:
            found.append(f"mean KL {body['kl_mean']:.3g} is not below {self.max_kl:.3g}")
        if not body["top1"] >= self.min_top1:
            found.append(f"top-1 agreement {body['top1']:.4%} is below {self.min_top1:.4%}")
        return found

    def to_json(self) -> dict[str, Any]:
        """The figures without the per-position lists."""
        kl = np.asarray(self.kl)
        ce = np.asarray(self.ce).reshape(-1, 2).mean(axis=0) if self.ce else (np.nan, np.nan)
        rest = {k: v for k, v in asdict(self).items() if k not in ("kl", "agree", "ce", "difference", "layers")}
        return {
            **rest,
            "positions": len(kl),
            "kl_mean": float(kl.mean()),
            "kl_p99": float(np.quantile(kl, 0.99)),
            "kl_max": float(kl.max()),
            "top1": float(np.mean(self.agree)),
            "largest_logit_difference": self.difference,
            "ce_reference": float(ce[0]),
            "ce_ours": float(ce[1]),
            "layer_errors": self.layers,
            "first_divergence": self.first_divergence,
        }


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
