"""What the tests of real trainers share: one corpus, one compile cache."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gang import Run, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compile-cache"  # one for all workers
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def new_run(tmp_path: Path, corpus: Path, compile_cache: Path) -> Iterator[Callable[..., Run]]:
    """Makes runs below the test's own folder; whatever still runs at the end is killed."""
    runs: list[Run] = []

    def make(name: str = "run", **options: Any) -> Run:
        runs.append(Run.new(tmp_path / name, corpus, options.pop("cache", compile_cache), **options))
        return runs[-1]

    yield make
    for run in runs:
        run.kill_all()
