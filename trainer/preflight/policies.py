"""What the backward pass finds saved and what it computes again: the policies a plan can name. Importable without JAX.

The planner tries them by `recomputed`, least first. `width` and `mlp` say what a layer saves per token, in vectors of the
model's and of the MLP's width: the shape of the memory model, whose scale is fitted to compiled programs (memory.py).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    name: str  # of Plan.remat
    width: float
    mlp: float
    recomputed: float  # FLOPs of a layer's forward pass that are done again, as a share of it


POLICIES = (
    Policy("none", width=8, mlp=2, recomputed=0),
    Policy("mlp", width=8, mlp=0, recomputed=0.41),
    Policy("full", width=1, mlp=0, recomputed=1),
)


def policy(name: str) -> Policy:
    """The policy called `name`; KeyError for none."""
    return {p.name: p for p in POLICIES}[name]
