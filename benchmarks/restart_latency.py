"""Death of a trainer process to the next start of its gang, on the local cluster. Prints one JSON object.

`python benchmarks/restart_latency.py [--rounds N]`. The trainers do nothing, so that only the supervisor is measured:
how soon it sees the death, takes the peers down, proves that every process is gone, and asks for the next start.
For a host failure one process is killed and its peer hangs, ignoring SIGTERM; for a preemption both leave with 75.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from orchestrator.clusters.base import Admission, GangRequest
from orchestrator.clusters.local import LocalCluster
from trainer.plan import Plan
from trainer.rundir.records import AttemptSpec
from trainer.settings import Settings

HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
LEAVES = "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); time.sleep(3600)"
SETTLE_SECONDS = 0.8  # past the supervisor's shortest time between two starts, and Python has set its handler


def measure(folder: Path, program: str, number: signal.Signals, rounds: int) -> list[float]:
    """Seconds from the first death of each of `rounds` starts to the request of the next start."""
    cluster = LocalCluster(folder)
    plan = Plan(
        device_type="cpu-8",
        processes=2,
        devices=8,
        global_batch=8,
        data_parallel=8,
        micro_batch=1,
        accumulation=1,
    )
    spec = AttemptSpec(
        attempt=1,
        nonce=uuid.uuid4().hex,
        gang="bench-a1",
        plan=plan,
        settings=Settings(target_step=1, data_root="/", grace_seconds=5),
        image="benchmark",
    )
    command = (sys.executable, "-I", "-S", "-c", program)
    gang = cluster.submit(GangRequest("bench", str(folder), spec, command))
    try:
        for _ in range(rounds):
            before = _wait_for_start(cluster, after=frozenset())
            time.sleep(SETTLE_SECONDS)
            os.kill(before[1], number)
            _wait_for_start(cluster, after=frozenset(before.values()))
        admissions = cluster.observe("bench").gangs[0].admissions
    finally:
        cluster.delete(gang.name, gang.uid, 0)
        while cluster.observe("bench").gangs:
            time.sleep(0.05)
    return [_gap(old, new) for old, new in itertools.pairwise(admissions)]


def _wait_for_start(cluster: LocalCluster, after: frozenset[int]) -> dict[int, int]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        pids = cluster.pids("bench-a1")
        if len(pids) == 2 and not after & set(pids.values()):
            return pids
        time.sleep(0.01)
    raise TimeoutError("the gang did not come up within 30 s")


def _gap(old: Admission, new: Admission) -> float:
    assert new.began is not None
    return new.began - min(end.time for end in old.containers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10, help="deaths per case")
    rounds = parser.parse_args().rounds
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, program, number in (
            ("host_failure_sigkill_peer_hangs", HANGS, signal.SIGKILL),
            ("preemption_exit_75", LEAVES, signal.SIGTERM),
        ):
            gaps = measure(Path(folder) / case, program, number, rounds)
            report[case] = {
                "deaths": len(gaps),
                "median_seconds": round(statistics.median(gaps), 4),
                "max_seconds": round(max(gaps), 4),
            }
    report["limit_seconds"] = 1.0
    report["ok"] = all(case["max_seconds"] < 1.0 for case in report.values() if isinstance(case, dict))
    print(json.dumps(report, indent=2))
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
