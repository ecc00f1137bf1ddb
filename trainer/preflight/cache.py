"""Compiled programs kept as text under ~/.cache/untildone/preflight, by a hash of all that decides them.

Recipe (but for the names of its data files, which no program sees), plan, compiler options, the sources the step is
made of, and versions. Importable without JAX.
"""

import gzip
import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainer.plan import Plan
from trainer.recipe import Recipe

PACKAGES = ("jax", "jaxlib", "libtpu")
FORMAT = 2  # of what is kept


def folder() -> Path:
    """Where they are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "untildone" / "preflight"


def versions() -> dict[str, str]:
    """Of what compiles."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def sources() -> str:
    """Digest of the trainer's own modules. Some of them do not reach the step: a wrong miss costs minutes, a wrong hit
    a wrong table."""
    digest = hashlib.sha256()
    here = Path(__file__).parent.parent
    for path in sorted([*here.glob("*.py"), Path(__file__).parent / "worker.py"]):
        if path.name not in UNRELATED:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


# Of the start and the loop around the step, edited often.
UNRELATED = {
    "beginning.py", "checkpoint.py", "cli.py", "commands.py", "commits.py", "convert.py", "data_root.py",
    "departure.py", "distributed.py", "evaluate.py", "freezing.py", "log.py", "loop.py", "progress.py",
    "requests.py", "restore.py", "settings.py", "standalone.py", "steplog.py", "train.py", "training.py", "watchdog.py",
}  # fmt: skip


def program(recipe: Recipe, plan: Plan, compiler_options: dict[str, str], installed: dict[str, str]) -> str:
    """The key."""
    body = {
        "recipe": program_recipe(recipe),
        "plan": plan.model_dump(mode="json"),
        "compiler_options": compiler_options,
        "versions": installed,
        "sources": sources(),
        "format": FORMAT,
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def program_recipe(recipe: Recipe) -> dict[str, Any]:
    """What of the recipe can reach the program."""
    body = recipe.model_dump(mode="json", exclude={"name", "stage", "init_seed"})
    for name in ("files", "held_out", "omitted_files", "order"):
        del body["data"][name]
    if body["data"]["packing"] is not None:
        body["data"]["packing"] = {"pad_id": body["data"]["packing"]["pad_id"]}
    return body


def find(key: str) -> tuple[dict[str, Any], str | None] | None:
    """The outcome kept under `key` and the program's text, if there was one."""
    outcome, text = _paths(key)
    if not outcome.is_file():
        return None
    return json.loads(outcome.read_text()), gzip.decompress(text.read_bytes()).decode() if text.is_file() else None


def keep(key: str, outcome: dict[str, Any], text: str | None) -> None:
    """Keep what a compilation gave."""
    folder().mkdir(parents=True, exist_ok=True)
    at, program_at = _paths(key)
    if text is not None:
        _write(program_at, gzip.compress(text.encode(), 6))
    _write(at, json.dumps(outcome, indent=1).encode())


def _paths(key: str) -> tuple[Path, Path]:
    return folder() / f"{key}.json", folder() / f"{key}.hlo.gz"


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
