"""From a change of a Workload or JobSet to the operator's first write because of it, with 50 runs in a lab.

`python benchmarks/operator_reaction.py [--runs N] [--admitted N] [--changes N]`. One change after another at random
moments: the Workload of a queued run is deactivated (spec.active: false), or the program of a run that trains fails, so
that its JobSet fails for good. Counted is from the earlier of the API server's answer to our change and the arrival of the
event at a watch of our own (of a JobSet, which its controller changes, from that arrival) until the store has the entry
of the ledger that says so: the first thing the operator writes. Before it come a look at the whole run, a list of the
run's objects at the API server, and perhaps a status and a heartbeat. Each change makes a new attempt with a new JobSet,
which is the rest of the operator's work meanwhile.

`bare_watch` is the baseline: from sending the change of a Workload to the arrival of its event at our own watch, which
does nothing else. `ratio` is the operator's median from sending to its write ÷ that of the bare watch. Prints one JSON
object; the goal is a p99 under one second.
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import urllib3

from benchmarks.fleet import FAIL, JOBSETS, WORKLOADS, Fleet, fleet, load_average
from tests.lab import faults
from tests.lab.api import Object, is_true

GOAL_SECONDS = 1.0
PAUSE_SECONDS = 0.6  # between two changes, on average
SETTLED_SECONDS = 2.0  # what a new attempt is left alone before it is changed
LAST_SECONDS = 30.0  # for the reactions to the last changes
SEED = 20260


@dataclass
class Change:
    """What was done to one attempt, and when (UNIX seconds): sent, answered, the event at our watch, the write."""

    kind: str  # deactivated, failed
    run: str
    attempt: int
    sent: float
    answered: float = float("inf")
    arrived: float = float("inf")
    written: float | None = None

    @property
    def news(self) -> float:
        return min(self.answered, self.arrived) if self.kind == "deactivated" else self.arrived


class Watch(threading.Thread):
    """Follows all objects of a collection; `see` gets each of their versions as it arrives."""

    def __init__(self, made: Fleet, path: str, see: Callable[[Object, float], None]) -> None:
        super().__init__(daemon=True)
        self._api, self._path, self._see = made.lab.api, path, see

    def run(self) -> None:
        listed = self._api.get(self._path)
        for obj in listed["items"]:
            self._see(obj, time.time())
        with contextlib.suppress(urllib3.exceptions.HTTPError):  # the lab ends before the watch does
            for _, obj in self._api.watch(self._path, listed["metadata"]["resourceVersion"], 600):
                self._see(obj, time.time())


class Changes:
    """Makes changes, and notes what comes of them."""

    def __init__(self, made: Fleet) -> None:
        self.made = made
        self.all: list[Change] = []
        self._dice = random.Random(SEED)
        self._workloads: dict[str, tuple[int, str, float]] = {}  # run → its newest attempt, Workload, since when
        self._changed: dict[tuple[str, int], Change] = {}
        for path, see in ((WORKLOADS, self._see_workload), (JOBSETS, self._see_jobset)):
            Watch(made, path, see).start()

    def make(self, number: int) -> None:
        """`number` changes, and what the operator wrote because of them."""
        while len(self.all) < number:
            time.sleep(self._dice.expovariate(1 / PAUSE_SECONDS))
            candidates = [run for run in self.made.runs if self._is_settled(run)]
            if candidates:
                self._change(self._dice.choice(candidates))
        deadline = time.monotonic() + LAST_SECONDS
        while self._read_ledgers() and time.monotonic() < deadline:
            time.sleep(1.0)

    def _is_settled(self, run: str) -> bool:
        attempt, _, since = self._workloads.get(run, (0, "", 0.0))
        trains = run in self.made.queued or (run, attempt) in self.made.trainers.claimed
        return attempt > 0 and trains and (run, attempt) not in self._changed and time.time() - since > SETTLED_SECONDS

    def _change(self, run: str) -> None:
        attempt, workload, _ = self._workloads[run]
        kind = "deactivated" if run in self.made.queued else "failed"
        change = self._changed[run, attempt] = Change(kind, run, attempt, time.time())
        if kind == "deactivated":
            self.made.lab.api.patch(f"{WORKLOADS}/{workload}", {"spec": {"active": False}})
        else:
            try:
                pod = self.made.trainers.claimed[run, attempt]["metadata"]["name"]
                faults.command(self.made.lab.ports["nodes"], "kill_pod", pod=f"default/{pod}", number=FAIL)
            except (KeyError, ValueError):  # on a machine under load, nodes go away by themselves
                del self._changed[run, attempt]
                return
        change.answered = time.time()
        self.all.append(change)

    def _see_workload(self, obj: Object, now: float) -> None:
        owner = obj["metadata"]["ownerReferences"][0]["name"]
        run, _, attempt = owner.rpartition("-a")
        if int(attempt) > self._workloads.get(run, (0, "", 0.0))[0]:
            self._workloads[run] = (int(attempt), obj["metadata"]["name"], now)
        if obj["spec"].get("active") is False:
            self._arrive(run, int(attempt), "deactivated", now)

    def _see_jobset(self, obj: Object, now: float) -> None:
        run, _, attempt = obj["metadata"]["name"].rpartition("-a")
        if is_true(obj, "Failed"):
            self._arrive(run, int(attempt), "failed", now)

    def _arrive(self, run: str, attempt: int, kind: str, now: float) -> None:
        change = self._changed.get((run, attempt))
        if change is not None and change.kind == kind:
            change.arrived = min(change.arrived, now)

    def _read_ledgers(self) -> bool:
        """Look up when the entries were written; whether one is missing still."""
        for run in {change.run for change in self.all if change.written is None}:
            written = self.made.written(run)
            for change in self.all:
                if change.run == run:
                    entries = (
                        at for key, at in written.items() if key.startswith(f"attempts/{change.attempt}/endings/")
                    )
                    change.written = min((at for at in entries if at > change.sent), default=None)
        return any(change.written is None for change in self.all)


def summary(seconds: list[float]) -> dict[str, float]:
    """Of some durations."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        "count": len(seconds),
        "p50_seconds": round(cuts[49], 3),
        "p99_seconds": round(cuts[98], 3),
        "max_seconds": round(max(seconds), 3),
    }


def measure(made: Fleet, number: int) -> dict[str, object]:
    """Make `number` changes, and say how long the operator took."""
    before, began = made.usage(), time.time()
    changes = Changes(made)
    changes.make(number)
    after, ended = made.usage(), time.time()
    seen = [change for change in changes.all if change.written is not None]
    waits = {id(c): c.written - c.news for c in seen if c.written is not None}
    deactivated = [c for c in seen if c.kind == "deactivated"]
    bare = [c.arrived - c.sent for c in deactivated]
    whole = [c.written - c.sent for c in deactivated if c.written is not None]
    everything = summary(list(waits.values()))
    return {
        "seconds": round(ended - began),
        "changes": len(changes.all),
        "without_reaction": len(changes.all) - len(seen),
        "workload_deactivated": summary([waits[id(c)] for c in deactivated]),
        "jobset_failed": summary([waits[id(c)] for c in seen if c.kind == "failed"]),
        "all": everything,
        "bare_watch": summary(bare),
        "ratio": round(statistics.median(whole) / statistics.median(bare), 2),
        "operator_cpu_share_of_one_core": round((after.cpu_seconds - before.cpu_seconds) / (ended - began), 2),
        "goal_p99_seconds": GOAL_SECONDS,
        "ok": len(seen) == len(changes.all) and everything["p99_seconds"] < GOAL_SECONDS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--admitted", type=int, default=10, help="of them: have a host each, and train")
    parser.add_argument("--changes", type=int, default=200)
    options = parser.parse_args()
    with fleet(options.runs, options.admitted) as made:
        found = measure(made, options.changes)
    print(
        json.dumps(
            {"benchmark": "operator_reaction", "runs": options.runs, "load_average": load_average(), **found}, indent=2
        )
    )
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
