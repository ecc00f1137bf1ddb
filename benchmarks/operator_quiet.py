"""What an operator does while nothing happens to its 50 runs: its calls, its reads of the store, its memory and CPU.

`python benchmarks/operator_quiet.py [--runs N] [--admitted N] [--seconds S]`. 10 of the runs train, which here means that
a report says one step more every ten seconds; 40 wait in the queue (benchmarks/fleet.py). The goal: of the API server it
asks only watches, one list per kind and watch, its lease, and at most one status per run and minute; it stays below
250 MB. Prints one JSON object; `ratio` is resident memory ÷ goal. `events` are what happened to runs all the same: a
machine under load loses the lab's nodes, and then nothing was measured.
"""

import argparse
import json
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fleet import Call, Fleet, fleet, load_average

KINDS = (
    "trainingruns", "jobsets", "workloads", "pods", "nodes", "localqueues", "clusterqueues", "resourceflavors",
)  # fmt: skip
SETTLE_SECONDS = 15.0
RESYNC_SECONDS, RENEW_SECONDS = 25.0, 5.0
STATUS_SECONDS = 59.0  # the operator's clock counts 60 between its calls; we see when they arrive
GOAL_MB = 250.0


def measure(made: Fleet, seconds: float) -> dict[str, object]:
    """Let `seconds` pass, and say what the operator did in them."""
    time.sleep(SETTLE_SECONDS)
    before, since = made.usage(), time.time()
    time.sleep(seconds)
    after, until = made.usage(), time.time()
    minutes = (until - since) / 60
    calls = made.calls(since, until)
    counts = Counter(f"{call.verb} {call.resource}" for call in calls)
    reads = Counter(r.run for r in made.store_requests(since, until) if r.method == "GET")
    statuses = [call for call in calls if call.resource == "trainingruns/status"]
    unexpected = _unexpected(counts, until - since)
    events = made.events(since, until)
    close = _too_close(statuses)
    kinds = {"training": made.admitted, "queued": made.queued}
    return {
        "seconds": round(until - since),
        "events": dict(events),
        "calls": dict(sorted(counts.items())),
        "calls_beyond_goal": unexpected,
        "status_writes_per_run_and_minute": {
            kind: round(sum(call.name in names for call in statuses) / len(names) / minutes, 2)
            for kind, names in kinds.items()
        },
        "status_writes_within_a_minute_of_another": close,
        "store_reads_per_run_and_minute": {
            kind: round(sum(reads[run] for run in names) / len(names) / minutes, 1) for kind, names in kinds.items()
        },
        "cpu_share_of_one_core": round((after.cpu_seconds - before.cpu_seconds) / (until - since), 3),
        "threads": after.threads,
        "resident_mb": {"before": round(before.resident_mb), "after": round(after.resident_mb)},
        "peak_mb": round(after.peak_mb),
        "goal_mb": GOAL_MB,
        "ratio": round(after.resident_mb / GOAL_MB, 2),
        "ok": not events and not unexpected and not close and after.peak_mb < GOAL_MB,
    }


def _unexpected(counts: Counter[str], seconds: float) -> dict[str, int]:
    """Calls that are of another sort than allowed, or of an allowed one too often: how many too many."""
    rounds = seconds / RESYNC_SECONDS + 2
    most = {f"{verb} {kind}": rounds for verb in ("list", "watch") for kind in KINDS}
    most |= {"update leases": seconds / RENEW_SECONDS + 2, "patch trainingruns/status": float("inf")}
    return {what: count - int(most.get(what, 0)) for what, count in counts.items() if count > most.get(what, 0)}


def _too_close(statuses: list[Call]) -> int:
    """Status writes that came sooner than a minute after one of the same run."""
    times: dict[str, list[float]] = {}
    for call in sorted(statuses, key=lambda call: call.received):
        times.setdefault(call.name, []).append(call.received)
    return sum(b - a < STATUS_SECONDS for each in times.values() for a, b in pairwise(each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--admitted", type=int, default=10, help="of them: have a host each, and train")
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    with fleet(options.runs, options.admitted) as made:
        found = measure(made, options.seconds)
    print(
        json.dumps(
            {"benchmark": "operator_quiet", "runs": options.runs, "load_average": load_average(), **found}, indent=2
        )
    )
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
