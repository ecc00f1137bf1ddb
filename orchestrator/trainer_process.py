"""The trainer's commands in a process of their own: the orchestrator imports neither JAX nor numpy."""

import os
import subprocess
import sys
from pathlib import Path

from trainer.errors import ConfigurationError, ExitCode, StorageUnavailable, TrainerError

TIMEOUT_SECONDS = 3600.0


def call(*arguments: str, timeout: float = TIMEOUT_SECONDS) -> "subprocess.CompletedProcess[str]":
    """`python -m trainer ARGUMENTS` of the trainer that belongs to this orchestrator, whatever folder we are called from."""
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "trainer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)


def failure(done: "subprocess.CompletedProcess[str]") -> TrainerError:
    """What the trainer said when it failed, as the error it was there."""
    lines = done.stderr.strip().splitlines() or [f"python -m trainer ended with exit code {done.returncode}"]
    text = lines[-1].removeprefix("error: ")
    if done.returncode == ExitCode.BAD_CONFIGURATION:
        return ConfigurationError(text)
    if done.returncode == ExitCode.STORAGE_UNAVAILABLE:
        return StorageUnavailable(text)
    return TrainerError(text)
