"""Who runs what, when tests of real processes and tests on a lab go on at once."""

from collections.abc import Iterable
from typing import Any

from xdist.scheduler import LoadFileScheduling

WITH_A_LAB = ("gw0", "gw1")  # each starts one, and two cores have not the third to spare
CLUSTER = "tests/cluster/"


def first_choice(files: Iterable[str], worker: str) -> str:
    """Which of `files`, at least one and in order, a worker takes: of those on a lab, or of all others, the first."""
    left = list(files)
    wanted = [file for file in left if file.startswith(CLUSTER) == (worker in WITH_A_LAB)]
    return (wanted or left)[0]


class LabsOfTheFirstTwo(LoadFileScheduling):
    """File by file, in order; but the first two workers take what needs a lab before anything else, all others after it.

    A test on a lab mostly waits, for a control plane or for a host to be called lost; a test of real trainers computes.
    One of these beside two of those keeps two cores busy.
    """

    def _assign_work_unit(self, node: Any) -> None:
        self.workqueue.move_to_end(first_choice(self.workqueue, node.gateway.id), last=False)
        super()._assign_work_unit(node)
