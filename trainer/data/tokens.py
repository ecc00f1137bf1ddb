"""Whether the tokens that reached the devices are the corpus's, for the steps of a run.

The ids hash of a step proves which instances were meant, this one what they held: the corpus is read again, apart from
the loader, and the hash of each batch's tokens is compared with the one computed on the devices. Reading everything
again would take as long as the run's own reading, so of a long run steps are sampled evenly, and the first of each
piece of log is added: that is where a start begins and where mistakes begin.
"""

from collections.abc import Sequence

import numpy as np

from trainer.data.coverage import Counter
from trainer.data.hashes import data_hash
from trainer.data.mix import Mix
from trainer.data.order import BatchOrder
from trainer.errors import ConfigurationError
from trainer.recipe import Recipe
from trainer.rundir.records import CommitRecord, StepLine

SAMPLED_STEPS = 64


class TokenCheck:
    """Compares sampled steps with the corpus below `root`; a mismatch becomes a problem of the audit.

    `unread` says why the corpus could not be read: then nothing is compared, and nothing is claimed.
    """

    def __init__(self, recipe: Recipe, order: BatchOrder, root: str | None, counter: Counter) -> None:
        self.compared = self.unequal = 0
        self.steps: set[int] = set()
        self.unread = ""
        self._recipe, self._order, self._counter = recipe, order, counter
        self._mix: Mix | None = None
        if root is None:
            self.unread = "no attempt says where the token files are; name them with --data-root"
            return
        try:
            self._mix = Mix(recipe, root)
            self._mix.check()
        except ConfigurationError as error:
            self._mix, self.unread = None, str(error)

    def sample(self, records: Sequence[CommitRecord], first: int, last: int) -> None:
        """Choose the steps to compare, of first+1..last."""
        spread = np.linspace(first + 1, last, min(SAMPLED_STEPS, last - first)).astype(np.int64).tolist()
        starts = {(r.ref.attempt, r.ref.start): r.step_log[0].first for r in reversed(records) if r.step_log}
        self.steps = {*spread, *starts.values()}

    def add(self, where: str, line: StepLine) -> None:
        """Compare the step of `line`, if it was chosen."""
        if self._mix is None or line.step not in self.steps:
            return
        self.compared += 1
        try:
            wanted = data_hash(self._mix.instances(self._order.batch_ids(line.step - 1)))
        except ConfigurationError as error:
            self._wrong(where, line, str(error))
            return
        if wanted != line.data:
            self._wrong(
                where, line, f"the tokens that reached the devices hash to {line.data}, the corpus's to {wanted}"
            )

    def _wrong(self, where: str, line: StepLine, why: str) -> None:
        self.unequal += 1
        self._counter.problem(line.step, where, f"step {line.step}: {why}")
