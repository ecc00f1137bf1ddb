"""MaxText in an environment of its own in the cache folder, from requirements/maxtext.txt: about 2 GB."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "maxtext.txt"


def cache_folder() -> Path:
    """Where the environment lives: outside the repository, named after its requirement file."""
    base = (
        os.environ.get("UNTILDONE_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "untildone"
    )
    return Path(base) / f"maxtext-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]}"


def install() -> Path:
    """MaxText's Python, installed on first use."""
    folder = cache_folder()
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"Installing MaxText into {folder} …", file=sys.stderr)
        uv = str(ROOT / ".tools" / "bin" / "uv")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True)
        subprocess.run([uv, "pip", "sync", "--quiet", "--python", str(python), str(REQUIREMENTS)], check=True)
        (folder / "complete").touch()
    return python


def package(python: Path) -> Path:
    """The folder of MaxText's own files."""
    return next(python.parent.parent.glob("lib/python*/site-packages/maxtext"))
