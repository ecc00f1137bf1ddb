"""The store on disk keeps the promises of store.py; so do the stores that other tests stand on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faulty_store import FaultyStore
from tests.support.memory_store import MemoryStore
from tests.support.store_conformance import CHECKS, Open, check_create_from_file
from trainer.rundir.disk import DiskStore


@pytest.fixture(params=["disk", "faulty(disk)", "memory"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    root = tmp_path / "run"
    root.mkdir()
    memory = MemoryStore()
    openers: dict[str, Open] = {
        "disk": lambda: DiskStore(root),
        "faulty(disk)": lambda: FaultyStore(DiskStore(root)),
        "memory": lambda: memory,
    }
    return openers[request.param]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Open], None], open_store: Open) -> None:
    check(open_store)


def test_create_from_file(open_store: Open, tmp_path: Path) -> None:
    check_create_from_file(open_store, tmp_path / "table")
