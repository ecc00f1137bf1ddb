"""A trainer that claims, reports and commits like the real one, but computes nothing and needs no JAX.

`python -m tests.support.committing_trainer STEP_SECONDS`. Rank 0 commits every step; the others wait. SIGTERM: exit 75
after the step in hand. RUNDIR/allow-<attempt>, if it exists, holds the highest step that this attempt may train to.
"""

import os
import signal
import sys
import time
from pathlib import Path

from tests.support.commits import commit, record_start
from trainer.errors import ExitCode, Fenced
from trainer.rundir.records import Progress, RequestDone
from trainer.rundir.rundir import RunDirectory


def main() -> int:
    told = False

    def on_term(*_: object) -> None:
        nonlocal told
        told = True

    signal.signal(signal.SIGTERM, on_term)
    seconds = float(sys.argv[1])
    folder = os.environ["UNTILDONE_RUN_DIRECTORY"]
    attempt = int(os.environ["UNTILDONE_ATTEMPT"])
    rundir = RunDirectory.open(folder)
    spec = rundir.read_spec(attempt)
    assert spec is not None
    target = spec.settings.target_step
    if os.environ["UNTILDONE_PROCESS_ID"] != "0":
        while not told:
            found = rundir.head()
            if found and found[0].commit and found[0].commit.step >= target:
                return 0
            time.sleep(0.05)
        return ExitCode.PREEMPTED
    pod, restart = os.environ["UNTILDONE_POD_UID"], int(os.environ["UNTILDONE_RESTART_ATTEMPT"])
    try:
        claim = rundir.claim(attempt, os.environ["UNTILDONE_NONCE"], pod, restart, stop=lambda: told, poll_seconds=0.05)
        record_start(rundir, claim, spec, pod, restart, time.time())
        step = claim.restore.step if claim.restore else 0
        beats = 0
        while step < target:
            time.sleep(seconds)
            if told:
                return ExitCode.PREEMPTED
            if step < allowed(Path(folder), attempt, target):
                step += 1
                commit(claim, step, time.time())
            for name, request in rundir.requests().items():
                if request.attempt == attempt:  # every step is committed
                    done = RequestDone(attempt=attempt, start=claim.start, step=step, time=time.time())
                    rundir.answer(name, done)
            beats += 1
            progress = Progress(phase="Training", step=step, committed_step=step, beats=beats, time=time.time())
            rundir.put_progress(attempt, claim.start, progress)
    except Fenced:
        return ExitCode.FENCED
    return ExitCode.DONE


def allowed(folder: Path, attempt: int, target: int) -> int:
    try:
        return int((folder / f"allow-{attempt}").read_text())
    except (FileNotFoundError, ValueError):
        return target


sys.exit(main())
