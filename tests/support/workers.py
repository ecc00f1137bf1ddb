"""What the processes of one session of tests have in common."""

import os
from pathlib import Path

import pytest


def common_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder for this session, the same in all of its processes."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder
