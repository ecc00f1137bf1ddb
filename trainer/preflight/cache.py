"""Reports kept under ~/.cache/untildone/preflight, by a hash of all that decides the program.

Recipe (but for the names of its data files, which no program sees), plan, compiler options, the sources the step is
made of, and versions. Importable without JAX.
"""

import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainer.plan import Plan
from trainer.preflight.accounting import Report, report_of
from trainer.recipe import Recipe

PACKAGES = ("jax", "jaxlib", "libtpu")
FORMAT = 1  # of the report


def folder() -> Path:
    """Where reports are kept."""
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
    for path in sorted([*here.glob("*.py"), *Path(__file__).parent.glob("*.py")]):
        if path.name not in UNRELATED:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


# Of the start and the loop around the step, edited often.
UNRELATED = {
    "beginning.py", "checkpoint.py", "cli.py", "command.py", "commands.py", "commits.py", "convert.py", "data_root.py",
    "departure.py", "distributed.py", "evaluate.py", "freezing.py", "log.py", "loop.py", "progress.py", "render.py",
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


def find(key: str) -> Report | None:
    """The report kept under `key`."""
    path = folder() / f"{key}.json"
    return report_of(json.loads(path.read_text())) if path.is_file() else None


def keep(report: Report) -> None:
    """Keep a report under its program."""
    folder().mkdir(parents=True, exist_ok=True)
    path = folder() / f"{report.program}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(report.to_json(), indent=1))
    temporary.replace(path)
