"""What the tests of real trainers share: one corpus, one compile cache."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gang import Run, write_corpus
from tests.support.workers import common_folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return common_folder(tmp_path_factory, "compile-cache")


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
