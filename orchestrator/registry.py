"""Which runs the local cluster's state folder knows, and where they are: `<local>/runs/<name>.json`, one per run.

Only for finding a run by its name. What a run is doing is never read from here: its run directory and its cluster say that.
"""

import os
import tempfile
from pathlib import Path

from trainer.frozen import Frozen


class RunNotFound(Exception):
    """No run of that name, and no run directory at that place."""


class KnownRun(Frozen):
    """Where a run is, and the file that asked for it."""

    name: str
    run_directory: str
    file: str


def default_local() -> Path:
    """`$XDG_STATE_HOME/untildone/local`, or `~/.local/state/untildone/local`."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "untildone" / "local"


def remember(local: Path, run: KnownRun) -> None:
    """Note where `run` is; replaces an older note of the same name, all or nothing."""
    folder = local / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{run.name}.", delete=False) as temporary:
        temporary.write(run.canonical())
    os.replace(temporary.name, folder / f"{run.name}.json")


def known_runs(local: Path) -> list[KnownRun]:
    """All runs noted in `local`, by name. A folder that does not exist yet knows none."""
    folder = local / "runs"
    if not folder.is_dir():
        return []
    return [KnownRun.parse(p.read_bytes(), str(p)) for p in sorted(folder.glob("[!.]*.json"))]


def find_run(local: Path, run: str) -> KnownRun:
    """The run named `run`, or the one whose run directory is `run`. Raises RunNotFound naming the known ones."""
    runs = known_runs(local)
    place = run if run.startswith("gs://") else str(Path(run).resolve())
    for known in runs:
        if known.name == run or known.run_directory.rstrip("/") in (run.rstrip("/"), place):
            return known
    if is_run_directory(run):
        return KnownRun(name=Path(run.rstrip("/")).name, run_directory=run, file="")
    names = ", ".join(known.name for known in runs) or "none"
    raise RunNotFound(f"no run {run!r} in {local}, and no run directory there (known runs: {names})")


def is_run_directory(place: str) -> bool:
    """Whether `place` looks like a run directory. A bucket is believed; reading it will tell."""
    return place.startswith("gs://") or any((Path(place) / mark).exists() for mark in ("recipe.json", "HEAD.d", "HEAD"))
