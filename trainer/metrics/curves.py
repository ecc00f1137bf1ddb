"""A curve (steps, values) from wherever one keeps curves: a run directory, an exported table, TensorBoard's files.

Tables come from W&B's or TensorBoard's export, from pandas, or from `metrics export`: CSV or JSON lines. Their columns are found by
what they are called, and the caller says which were taken.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.errors import ConfigurationError
from trainer.metrics import names

F64 = npt.NDArray[np.float64]

STEPS = ("step", "globalstep", "trainerglobalstep", "steps", "iteration", "iter")
EXTREMES = ("__MIN", "__MAX")  # W&B's export has these beside each metric
TRAINING = (names.CE_LOSS, "train/loss", "training loss", "loss")
HELD_OUT = (names.HELD_OUT, "eval/lm/c4_en-validation/CE loss", "validation loss", "val_loss", "eval_loss")


@dataclass(frozen=True)
class Curve:
    """Values at ascending steps, each step once, all finite. `taken` says from which columns."""

    source: str
    taken: str
    steps: F64
    values: F64


def load(source: str, wanted: tuple[str, ...], column: str | None = None, step_column: str | None = None) -> Curve:
    """The first metric of `wanted` that `source` has, or `column`. Raises ConfigurationError, listing what there is."""
    path = Path(source)
    if "://" in source or (path.is_dir() and (path / "recipe.json").exists()):
        return _of_run(source, (column,) if column else wanted)
    if path.is_dir():
        return _of_tensorboard(path, (column,) if column else wanted)
    if not path.is_file():
        raise ConfigurationError(f"{source}: no such file or folder")
    return _of_table(path, (column,) if column else wanted, exact=column is not None, step_column=step_column)


def _of_run(uri: str, wanted: tuple[str, ...]) -> Curve:
    """Of a run directory only what is wanted is kept: a long run has millions of numbers."""
    from trainer.metrics.committed import Committed
    from trainer.rundir.rundir import RunDirectory

    run = Committed(RunDirectory.open(uri))
    records = run.since(None)
    if not records:
        raise ConfigurationError(f"{uri}: nothing is committed yet")
    of_steps = any(name in names.OF_A_STEP for name in wanted)
    there = set() if of_steps else run.evaluated()
    found: dict[str, tuple[list[int], list[float]]] = {}
    before = None
    for record in records:
        if of_steps:
            points = run.steps(record, before)
        else:
            evaluation = run.evaluation(record.ref) if record.ref in there else None
            points = iter([evaluation] if evaluation else [])
        for point in points:
            for name in wanted if of_steps else point.values:
                if name in point.values:
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(point.step)
                    values.append(point.values[name])
        before = record
    name = _pick(uri, list(found), wanted)
    return _curve(uri, f"{name!r} of its {'committed steps' if of_steps else 'evaluations'}", *found[name])


def _of_tensorboard(folder: Path, wanted: tuple[str, ...]) -> Curve:
    from trainer.metrics.event_files import read_scalars

    if not any("tfevents" in p.name for p in folder.rglob("*")):
        raise ConfigurationError(f"{folder}: neither a run directory nor TensorBoard's event files")
    found: dict[str, tuple[list[int], list[float]]] = {}
    for tag, step, value in read_scalars(folder):
        steps, values = found.setdefault(tag, ([], []))
        steps.append(step)
        values.append(value)
    tag = _pick(str(folder), list(found), wanted)
    return _curve(str(folder), f"{tag!r} of its event files", *found[tag])


def _of_table(path: Path, wanted: tuple[str, ...], exact: bool, step_column: str | None) -> Curve:
    try:
        rows = list(_rows(path))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path}: neither CSV nor JSON lines: {error}") from None
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not rows:
        raise ConfigurationError(f"{path}: no rows")
    step = step_column or next((c for c in columns if _plain(c) in STEPS), None)
    step = step or next((c for c in columns if _plain(c.rpartition(" - ")[2]) in STEPS), None)
    if step is None or step not in columns:
        raise ConfigurationError(
            f"{path}: no column {step_column or 'step'!r}; name it with --step-column: {_list(columns)}"
        )
    others = [c for c in columns if c != step and not c.endswith(EXTREMES)]
    value = _pick(str(path), others, wanted, "value" if not exact else None)
    steps, values = [], []
    for number, row in enumerate(rows, 2):
        a, b = row.get(step), row.get(value)
        if a in (None, "") or b in (None, ""):
            continue  # W&B leaves a cell empty where a run did not log
        try:
            steps.append(float(a))
            values.append(float(b))
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"{path}, line {number}: {a!r}, {b!r} in {step!r}, {value!r} are no numbers"
            ) from None
    return _curve(str(path), f"column {value!r} over {step!r}", steps, values)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        start = file.read(1)
        file.seek(0)
        if start == "{":
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line) if line.strip() else {}
                except ValueError:
                    raise ConfigurationError(f"{path}, line {number}: no JSON") from None
                if not isinstance(row, dict):
                    raise ConfigurationError(f"{path}, line {number}: no JSON object")
                if row:
                    yield row
        else:
            for row in csv.DictReader(file):
                yield {key: value for key, value in row.items() if key is not None}


def _pick(source: str, there: list[str], wanted: tuple[str, ...], otherwise: str | None = None) -> str:
    """The name in `there` for the first of `wanted` that is there: equal, or equal but for signs and case, or as its end."""
    for name in (*wanted, *([otherwise] if otherwise else [])):
        for same in (
            lambda have, name=name: have == name,
            lambda have, name=name: _plain(have) == _plain(name),
            lambda have, name=name: have.rpartition(" - ")[2] == name,
            lambda have, name=name: _plain(have.rpartition(" - ")[2]) == _plain(name),
        ):
            found = [have for have in there if same(have)]
            if len(found) > 1:
                raise ConfigurationError(f"{source}: {_list(found)} are all {name!r}; say which one with --column")
            if found:
                return found[0]
    raise ConfigurationError(f"{source}: no {' or '.join(map(repr, wanted))}; name one with --column: {_list(there)}")


def _curve(source: str, taken: str, steps: Iterable[float], values: Iterable[float]) -> Curve:
    """In order of steps; of a step that is there twice, the later one counts, as TensorBoard has it after a resume."""
    last = dict(zip(steps, values, strict=True))
    s = np.array(sorted(last), np.float64)
    v = np.array([last[step] for step in s], np.float64)
    finite = np.isfinite(v)
    if not finite.any():
        raise ConfigurationError(f"{source}: no numbers in {taken}")
    left = int(np.count_nonzero(~finite))
    return Curve(
        source, taken + (f" ({left:,} that are no finite numbers left out)" if left else ""), s[finite], v[finite]
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _list(columns: list[str], shown: int = 12) -> str:
    more = f" and {len(columns) - shown} more" if len(columns) > shown else ""
    return ", ".join(map(repr, columns[:shown])) + more
