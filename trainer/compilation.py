"""The train step's executable, from shapes alone: before a state or a batch exists, and beside whatever the gang does.

Nothing is executed here and no other process is asked.
"""

import threading
from typing import Any

from jax.sharding import Mesh

from trainer.alongside import Alongside
from trainer.plan import Plan
from trainer.recipe import Recipe
from trainer.step import lower_train_step


class Compilation:
    """`(state, batch) -> (state, metrics)` as trainer.step.make_train_step has it: traced, then compiled or loaded.

    JAX writes an inner function once for all its calls as long as its caches still know it. Importing Orbax or Grain in
    another thread meanwhile makes it forget, and then it depends on the timing which functions stand in the program
    twice: it has another key in the compile cache at every start, and another text in each process of a gang. So
    imports end before this begins, and nothing else is traced before `traced`. Tracing holds Python's lock: nothing is lost.
    """

    def __init__(self, recipe: Recipe, plan: Plan, mesh: Mesh) -> None:
        self._recipe, self._plan, self._mesh = recipe, plan, mesh
        self._traced = threading.Event()
        self._compiled = Alongside("compile", self._compile)

    def traced(self) -> None:
        """Wait until the program is written; an error is kept for `result`."""
        self._traced.wait()

    def result(self) -> Any:
        """The executable, once it is there; raises what tracing or compiling raised."""
        return self._compiled.result()

    def _compile(self) -> Any:
        try:
            lowered = lower_train_step(self._recipe, self._plan, self._mesh)
        finally:
            self._traced.set()
        return lowered.compile()
