"""What holds for every test: eight CPU devices, quick to compile for, set before anything imports jax; Ctrl-C as in a terminal."""

import os
import signal
from typing import Any

import pytest

from tests.support.share_out import LabsOfTheFirstTwo

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs that run for milliseconds: compiling them was half of the tests' time. A test that counts last digits asks for
# the optimisations of training. Trainers that run as processes do not inherit this: tests/support/gang.py says theirs.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")

# A shell starts its background jobs with SIGINT ignored, and so would be all that the tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take minutes, the longest first: one that began last would run on alone at the end.
LONG = (
    *(
        "invariant",
        "trainer_plans",
        "demo",
        "trainer_interruptions",
        "memorisation",
        "preflight",
        "trainer_damage",
        "trainer_requests",
        "start_up",
        "evaluation",
        "trainer_profiles",
    ),
    *("operated", "outages", "operator_killed", "daemon", "helm", "trainer_pods", "jobset"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order of LONG, then as they were."""
    place = {f"test_{name}": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LabsOfTheFirstTwo | None:
    """Several workers, file by file: see there."""
    return LabsOfTheFirstTwo(config, log) if config.getvalue("dist") == "loadfile" else None
