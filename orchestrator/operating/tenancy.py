"""Which places in buckets and on disks the runs of a namespace may name. Pure; asked before anything is read.

A run names its run directory, its data and what it starts from; the operator reads all of that with its own rights. So
each namespace has a list of prefixes, and a place is allowed when it lies below one of them, folder by folder.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.api import TrainingRun
from trainer.recipe import Recipe

RUN_DIRECTORIES = "runDirectories"
_BUILT_IN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
EVERYWHERE = "*"  # the key for namespaces that are not listed


def refusals(run: TrainingRun, namespace: str, allowed: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Why the operator must not read what `run` names, one sentence per field with the fix; empty when it may."""
    prefixes = allowed.get(namespace, allowed.get(EVERYWHERE, ()))
    found = [why for field, place in places(run) if (why := _refused(field, place, namespace, prefixes))]
    name = run.spec.recipe.name
    if name is not None and not _BUILT_IN.fullmatch(name):
        found.append(
            f"spec.recipe.name {name!r}: under the operator only a recipe that comes with untildone, by its name; write "
            "your own into a ConfigMap and refer to it with spec.recipe.configMap"
        )
    return tuple(found)


def places(run: TrainingRun) -> Iterator[tuple[str, str]]:
    """Every (field, place) of a run that somebody reads or writes on its behalf."""
    spec = run.spec
    yield "spec.runDirectory", spec.run_directory
    yield "spec.data.root", spec.data.root
    if spec.compile_cache is not None and "://" in spec.compile_cache:  # else it is in the pod's own file system
        yield "spec.compileCache", spec.compile_cache
    if spec.init_from is not None:
        if spec.init_from.run is not None:
            yield "spec.initFrom.run", re.sub(r"@\d+$", "", spec.init_from.run)
        if spec.init_from.checkpoint is not None:
            yield "spec.initFrom.checkpoint", spec.init_from.checkpoint
        if spec.init_from.hf is not None:
            yield "spec.initFrom.hf", spec.init_from.hf


def escapes(recipe: Recipe) -> tuple[str, ...]:
    """Why a recipe's data files must not be read: paths that lead out of spec.data.root."""
    files = (*recipe.data.files, *recipe.data.held_out)
    bad = [file.path for file in files if _parts(f"file:///{file.path}") is None or file.path.startswith("/")]
    return tuple(f"recipe data file {path!r}: name it relative to spec.data.root, without '.' or '..'" for path in bad)


def below(place: str, prefix: str) -> bool:
    """Whether `place` is the folder `prefix` or lies in it: gs://b/ab does not lie in gs://b/a."""
    where, root = _parts(place), _parts(prefix)
    return where is not None and root is not None and where[: len(root)] == root


def _parts(place: str) -> tuple[str, ...] | None:
    """Scheme and folders; None for a place that does not mean one certain folder."""
    scheme, separator, rest = place.partition("://")
    if not separator:
        scheme, rest = "file", place
    if scheme == "file" and not rest.startswith("/"):
        return None  # relative to a folder that nobody knows
    folders = (rest[1:] if scheme == "file" else rest).removesuffix("/").split("/")
    if any(folder in ("", ".", "..") for folder in folders) or any(ord(sign) < 32 for sign in place):
        return None
    return (scheme, *folders)


def _refused(field: str, place: str, namespace: str, prefixes: Sequence[str]) -> str | None:
    if _parts(place) is None:
        return f"{field} {place!r}: write it as gs://bucket/folder or as an absolute path, without '.', '..' or empty folders"
    if any(below(place, prefix) for prefix in prefixes):
        return None
    may = ", ".join(prefixes) if prefixes else "nothing yet"
    return (
        f"{field} {place}: runs in namespace {namespace} may use {may}; choose a folder there, or let an administrator add "
        f"one to {RUN_DIRECTORIES}.{namespace} in the operator's configuration (Helm value {RUN_DIRECTORIES})"
    )
