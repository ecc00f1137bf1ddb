"""`python -m trainer.preflight.worker REQUEST`: lowers and compiles one train step for a slice that is not here.

A process of its own: the compiler takes gigabytes and may abort, and its environment must be set before JAX is
imported (preflight.ENVIRONMENT). REQUEST names a JSON file {"recipe", "plan", "compiler_options", "out"}; the worker writes
OUT/program.hlo and OUT/compiled.json.
"""

import ctypes
import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def main(request: Path) -> None:
    """Compile what `request` asks for; the outcome, an error of the compiler included, goes to OUT/compiled.json."""
    from trainer.plan import Plan
    from trainer.recipe import Recipe

    _end_with_parent()
    asked = json.loads(request.read_text())
    recipe, plan = Recipe.parse(asked["recipe"], "recipe"), Plan.parse(asked["plan"], "plan")
    out = Path(asked["out"])
    outcome = compile_step(recipe, plan, asked["compiler_options"], out / "program.hlo")
    (out / "compiled.json").write_text(json.dumps(outcome))


def _end_with_parent() -> None:
    """Nobody would read the outcome, and it takes a core for minutes. Linux only, as is libtpu."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def compile_step(recipe: Any, plan: Any, compiler_options: dict[str, str], text: Path) -> dict[str, Any]:
    """{"error", "lower_seconds", "compile_seconds", "memory"}; `error` is the compiler's message, or None."""
    import jax

    from trainer.step import lower_train_step

    began = time.monotonic()
    mesh = mesh_for(plan, recipe)
    lowered = lower_train_step(recipe, plan, mesh)
    outcome: dict[str, Any] = {"error": None, "lower_seconds": time.monotonic() - began, "memory": {}}
    began = time.monotonic()
    try:
        compiled = lowered.compile(compiler_options=compiler_options or None)
    except jax.errors.JaxRuntimeError as error:
        return outcome | {"error": str(error), "compile_seconds": time.monotonic() - began}
    outcome["compile_seconds"] = time.monotonic() - began
    text.write_text(whole_text(compiled))
    return outcome | {"memory": memory(compiled)}


def memory(compiled: Any) -> dict[str, int]:
    """Bytes by what they are for; `peak_memory` is what must fit."""
    stats = compiled.memory_analysis()
    return {name.removesuffix("_in_bytes"): getattr(stats, name) for name in dir(stats) if name.endswith("_in_bytes")}


def mesh_for(plan: Any, recipe: Any) -> Any:
    """The mesh of the plan over the devices of its slices, of which none need be here."""
    from jax.experimental import topologies

    from trainer.hardware import device_type
    from trainer.sharding import mesh_of

    kind = device_type(plan.device_type)
    several = {"num_slices": plan.slices} if plan.slices > 1 else {}
    topology = topologies.get_topology_desc(f"{kind.family}:{kind.topology}", "tpu", **several)
    return mesh_of(topology.devices, plan.sequence, plan.tensor, plan.slices_apart(recipe))


def whole_text(compiled: Any) -> str:
    """The optimised program with its constants written out, as the masks of the attention kernels are among them; but not
    the tables of floating-point numbers, which are most of the text then."""
    from jaxlib import _hlo

    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    options.print_metadata = True
    options.print_backend_config = True
    whole = "\n".join(module.to_string(options) for module in compiled.runtime_executable().hlo_modules())
    return _TABLE.sub(r"\1{...})", whole)


_TABLE = re.compile(r"(= (?:f32|bf16)\[[^\]]*\]\S* constant\()\{[^()]{5000,}\}\)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
