"""The store on disk keeps the promises of store.py; so does the wrapper that tests use to break them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faulty_store import FaultyStore
from tests.support.store_conformance import CHECKS, Open, check_create_from_file
from trainer.rundir.disk import DiskStore


@pytest.fixture(params=["disk", "faulty(disk)"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    root = tmp_path / "run"
    root.mkdir()
    return lambda: DiskStore(root) if request.param == "disk" else FaultyStore(DiskStore(root))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Open], None], open_store: Open) -> None:
    check(open_store)


def test_create_from_file(open_store: Open, tmp_path: Path) -> None:
    check_create_from_file(open_store, tmp_path / "table")
