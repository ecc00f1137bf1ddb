"""`python -P compile_worker.py REQUEST`: compile one train step, ours or MaxText's, and say what it took.

Runs in the environment of whose step it is. REQUEST is a JSON file: "whose", "root" of this repository, "out", and of ours
"recipe" and "plan", of MaxText's "arguments" (the command line of its train_compile). Writes OUT/compiled.json and, when it
compiles, OUT/program.hlo. -P because a file beside this one is called maxtext.
"""

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


class Clock:
    """Seconds of wall clock and of all threads since the process began, at the last lowering that ended."""

    def __init__(self) -> None:
        self.began = time.monotonic() - time.process_time()  # the interpreter's start is CPU time
        self.lowered = self.now()

    def now(self) -> dict[str, float]:
        return {"wall": time.monotonic() - self.began, "cpu": time.process_time()}

    def event(self, name: str, _duration: float, **_: Any) -> None:
        if name == LOWERED:
            self.lowered = self.now()


def main(request: Path) -> None:
    asked = json.loads(request.read_text())
    clock, out = Clock(), Path(asked["out"])
    sys.path.append(asked["root"])
    import jax

    jax.monitoring.register_event_duration_secs_listener(clock.event)
    step = ours(asked) if asked["whose"] == "ours" else maxtext(asked["arguments"])
    compiled, error = None, None
    prepared = clock.now()
    try:
        compiled = step()
    except jax.errors.JaxRuntimeError as refusal:
        error = str(refusal)
    done = clock.now()
    outcome = {
        "error": error,
        "memory": {},
        "phases": {
            "prepare": prepared,
            "lower": {kind: clock.lowered[kind] - prepared[kind] for kind in done},
            "compile": {kind: done[kind] - clock.lowered[kind] for kind in done},
        },
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
    }
    if compiled is not None:
        from trainer.preflight.worker import memory, whole_text

        outcome["memory"] = memory(compiled)
        (out / "program.hlo").write_text(whole_text(compiled))
    (out / "compiled.json").write_text(json.dumps(outcome))


def ours(asked: dict[str, Any]) -> Callable[[], Any]:
    """Lowers and compiles what `make_train_step` returns."""
    from trainer.plan import Plan
    from trainer.preflight.worker import mesh_for
    from trainer.recipe import Recipe
    from trainer.step import lower_train_step

    recipe, plan = Recipe.parse(asked["recipe"], "recipe"), Plan.parse(asked["plan"], "plan")
    mesh = mesh_for(plan, recipe)
    return lambda: lower_train_step(recipe, plan, mesh).compile()


def maxtext(arguments: list[str]) -> Callable[[], Any]:
    """What `maxtext.trainers.pre_train.train_compile` does up to its jit_and_compile, with its functions in its order."""
    import jax
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    config = pyconfig.initialize(arguments)
    train_compile.validate_config(config)
    mesh = train_compile.get_topology_mesh(config)
    shaped, named, shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
    parameters, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    given = sharding.build_zero1_input_state_mesh_shardings(config, shardings, parameters)
    data = sharding.get_input_data_sharding(config, mesh)
    function, in_, out, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, data, given, model, config, parameters
    )
    rules = train_compile.axis_rules(config.logical_axis_rules)
    return lambda: train_compile.jit_and_compile(
        function, shaped, named, mesh, in_, out, static, donated, config, rules
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
