"""A run's metrics as JSON lines or CSV, one row per step, for pandas, W&B and spreadsheets.

CSV has one column per metric; JSON lines leave out what a step does not have. Floats come back as the same floats.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator
from typing import IO

from trainer.metrics.committed import Committed, Point
from trainer.metrics.names import OF_A_STEP

FORMATS = ("jsonl", "csv")


def rows(run: Committed, advance: Callable[[int, int], None] = lambda done, total: None) -> Iterator[Point]:
    """All committed steps in order; what belongs to a commit or to its evaluation is part of the row of its step."""
    records, there, before = run.since(None), run.evaluated(), None
    for done, record in enumerate(records, 1):
        later = [run.evaluation(record.ref), run.score(record.ref)] if record.ref in there else []
        for point in run.steps(record, before):
            if point.step == record.ref.step:
                for more in later:
                    point.values.update(more.values if more is not None else {})
            yield point
        before = record
        advance(done, len(records))


def write_json_lines(points: Iterator[Point], file: IO[str]) -> int:
    count = 0
    for point in points:
        finite = {name: value if math.isfinite(value) else None for name, value in point.values.items()}
        file.write(json.dumps({"step": point.step, "time": round(point.time, 3), **finite}) + "\n")
        count += 1
    return count


def write_csv(points: Iterator[Point], file: IO[str]) -> int:
    """Reads all points before it writes: the columns are those that occur, in the order of their first step."""
    kept = list(points)
    seen = dict.fromkeys(name for point in kept for name in point.values)
    columns = [name for name in OF_A_STEP if name in seen] + [name for name in seen if name not in OF_A_STEP]
    writer = csv.writer(file)
    writer.writerow(["step", "time", *columns])
    for point in kept:
        values = [point.values.get(name) for name in columns]
        writer.writerow([point.step, round(point.time, 3), *("" if v is None else repr(v) for v in values)])
    return len(kept)
