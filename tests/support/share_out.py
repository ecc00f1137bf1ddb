"""Who runs what, when tests of real processes and tests on a lab go on at once."""

from typing import Any

from xdist.scheduler import LoadFileScheduling

WITH_A_LAB = ("gw0", "gw1")  # each starts one; what it costs while nothing happens, two cores do not have thrice
CLUSTER = "tests/cluster/"


class LabsOfTheFirstTwo(LoadFileScheduling):
    """File by file, as they come; but the first two workers take what needs a lab before anything else, all others after it.

    A test on a lab mostly waits, for a control plane or for a host to be called lost; a test of real trainers computes.
    One of the latter beside two of the former keeps two cores busy.
    """

    def _assign_work_unit(self, node: Any) -> None:
        with_a_lab = node.gateway.id in WITH_A_LAB
        wanted = (file for file in self.workqueue if file.startswith(CLUSTER) == with_a_lab)
        first = next(wanted, None)
        if first is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
