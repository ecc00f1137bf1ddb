"""Builds Helm for the tests and for `make manifests`, from source, once per machine.

modules/helm/go.mod names its version. The binary goes to $UNTILDONE_CACHE (or ~/.cache/untildone), in
lab/<hash of go.mod and go.sum>. It takes three minutes on two cores. Its modules want other versions than the control
plane's, so they are in a file of their own.

    python -m tests.lab.build_helm        builds, prints the path
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from tests.lab.build_gcs import Say, compile_packages, find_go, install_go, say

MODULES = Path(__file__).parent / "modules" / "helm"
PACKAGE = "helm.sh/helm/v4/cmd/helm"
VERSION = "v4.3.1"


def cache_folder() -> Path:
    """Where the binary of this go.mod and go.sum lies."""
    base = Path(os.environ.get("UNTILDONE_CACHE") or Path.home() / ".cache" / "untildone")
    content = (MODULES / "go.mod").read_bytes() + (MODULES / "go.sum").read_bytes()
    return base / "lab" / hashlib.sha256(content).hexdigest()[:12]


def helm_binary(progress: Say = say) -> Path:
    """Path of Helm, built if it is not there yet. Raises RuntimeError saying what failed."""
    folder = cache_folder()
    binary = folder / "helm"
    if binary.exists():
        return binary
    folder.mkdir(parents=True, exist_ok=True)
    go = find_go() or install_go(folder, progress)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch) / binary.name
        build(go, target, progress)
        os.replace(target, binary)  # builders racing for it each bring a whole one
    return binary


def build(go: Path, target: Path, progress: Say) -> None:
    """`go build` to `target`, with a line of progress every few seconds."""
    progress(f"building {PACKAGE} {VERSION} with {go} (about three minutes, once)")
    flags = f"{os.environ.get('GOFLAGS', '')} -mod=readonly".strip()
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": flags, "GOTOOLCHAIN": "local"}
    linker = f"-s -w -X helm.sh/helm/v4/internal/version.version={VERSION}"
    command = [str(go), "build", "-v", "-trimpath", "-ldflags", linker, "-o", str(target), PACKAGE]
    seconds = compile_packages(command, environment, progress, cwd=MODULES)
    progress(f"  helm built in {seconds:.0f} s")


if __name__ == "__main__":
    try:
        print(helm_binary())
    except RuntimeError as error:
        sys.exit(str(error))
