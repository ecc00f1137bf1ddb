"""One lab for all tests of this folder: a real control plane whose pods are real processes."""

from collections.abc import Iterator

import pytest

from tests.lab.lab import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two tpu7x slices of two hosts, and a plain node. Builds the control plane where it is missing."""
    lab = Lab.start(tmp_path_factory.mktemp("lab"), {"tpu7x-2x2x2": 2})
    yield lab
    lab.stop()
