"""Starts and commits as a trainer writes them, without a trainer."""

from trainer.rundir.claims import Claim
from trainer.rundir.records import AttemptSpec, CommitRecord, StartRecord, StepLine
from trainer.rundir.rundir import RunDirectory


def commit(claim: Claim, step: int, now: float) -> None:
    """Commit `step` as a trainer does, with an empty checkpoint."""
    line = StepLine(step=step, loss=1.0, grad_norm=1.0, lr=0.1, skipped=False, ids="0", data="0", seconds=0.1)
    log = claim.append_step_log([line])
    ref = claim.ref(step)
    claim.commit(
        CommitRecord(
            ref=ref,
            parent=claim.commit_ref,
            checkpoint=ref.checkpoint,
            files=(),
            digest={},
            step_log=(log,),
            fingerprint="",
            versions={},
            save_seconds=0.0,
            time=now,
        )
    )


def record_start(
    rundir: RunDirectory, claim: Claim, spec: AttemptSpec, pod_uid: str, restart_attempt: int, now: float
) -> None:
    """start.json, as rank 0 writes it right after its claim."""
    rundir.create_start(
        StartRecord(
            attempt=spec.attempt,
            start=claim.start,
            pod_uid=pod_uid,
            restart_attempt=restart_attempt,
            processes=spec.plan.processes,
            devices=spec.plan.devices,
            device_kind="cpu",
            restored=claim.restore,
            versions={},
            fingerprint="",
            settings=spec.settings,
            plan=spec.plan,
            time=now,
        )
    )
