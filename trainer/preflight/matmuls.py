"""Floating-point operations of the matrix products in an optimised program. XLA for TPU writes each as a convolution."""

import math
import re
from dataclasses import dataclass
from typing import Any

from trainer.preflight.executions import PRODUCTS, Executions
from trainer.preflight.hlo import Computation, HloError, Instruction


@dataclass(frozen=True)
class Matmul:
    """One matrix product, executed `times` a step."""

    instruction: Instruction  # the product itself, perhaps inside a fusion
    scheduled: Instruction  # what the schedule runs: the fusion, or the product
    flops: int  # of one execution
    times: int

    @property
    def is_recomputed(self) -> bool:
        """Whether the forward pass has done it before: by jax.checkpoint, or by XLA when memory ran short."""
        by_xla = ".remat" in self.scheduled.name or ".remat" in self.instruction.name
        return by_xla or "rematted_computation" in self.instruction.op_name


def matmuls(executions: Executions) -> list[Matmul]:
    """All of them that run on the TensorCore."""
    found = []
    for computation, scheduled, times in executions.scheduled():
        if scheduled.opcode in PRODUCTS:
            found.append(Matmul(scheduled, scheduled, flops(computation, scheduled), times))
        for inside, inner in executions.module.inside(scheduled):
            if inner.opcode in PRODUCTS:
                found.append(Matmul(inner, scheduled, flops(inside, inner), times))
    return found


def flops(computation: Computation, product: Instruction) -> int:
    """Two per multiply-add."""
    lhs, rhs = (computation.operand(product, i).arrays[0].dims for i in (0, 1))
    out = product.arrays[0].dims
    if product.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", product.attributes)
        dims = [int(d) for d in contracted[1].split(",") if d] if contracted else []
        return 2 * math.prod(out) * math.prod(lhs[d] for d in dims)
    labels = product.attribute("dim_labels")
    if labels is None:
        raise HloError(f"convolution {product.name} has no dim_labels")
    inputs, _, rest = labels.partition("_")
    kernel, _, output = rest.partition("->")
    total = 2 * out[output.index("b")] * out[output.index("f")] * rhs[kernel.index("i")]
    window = _window(product)
    for number, label in enumerate(sorted(c for c in output if c.isdecimal())):
        settings = {name: values[number] for name, values in window.items()}
        total *= _positions(lhs[inputs.index(label)], rhs[kernel.index(label)], out[output.index(label)], **settings)
    return total


def _window(product: Instruction) -> dict[str, list[Any]]:
    """window={size=… stride=… pad=… lhs_dilate=… rhs_dilate=…} by spatial dimension."""
    found = re.search(r"\bwindow=\{([^}]*)\}", product.attributes)
    window: dict[str, list[Any]] = {}
    for pair in found[1].split() if found else ():
        name, _, values = pair.partition("=")
        if name == "pad":
            window[name] = [(int(low), int(high)) for low, _, high in (v.partition("_") for v in values.split("x"))]
        elif name in ("stride", "lhs_dilate", "rhs_dilate"):
            window[name] = [int(v) for v in values.split("x")]
    return window


def _positions(
    size: int,
    kernel: int,
    out: int,
    stride: int = 1,
    pad: tuple[int, int] = (0, 0),
    lhs_dilate: int = 1,
    rhs_dilate: int = 1,
) -> int:
    """Pairs of an output and a kernel position that meet an input element: padding and holes are not multiplied."""
    meet = 0
    for position in range(out):
        start = position * stride - pad[0]
        for k in range(kernel):
            at = start + k * rhs_dilate
            meet += at >= 0 and at % lhs_dilate == 0 and at // lhs_dilate < size
    return meet
