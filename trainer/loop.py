"""The step loop: batch t into the state at step t, metrics one step behind, commits on their steps, one last step.

The loop never waits for a step's numbers before it has handed the next one to the devices, except where a commit needs
them: nothing is committed before the loss of every step in it has been looked at.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer.commits import Committer
from trainer.departure import End
from trainer.distributed import Gang
from trainer.errors import ExitCode, NonFiniteLoss
from trainer.evaluate import Evaluator, due, evaluate_commit
from trainer.guard import Guard
from trainer.profiles import Order, Profiles
from trainer.progress import Monitor
from trainer.recipe import Recipe
from trainer.requests import Agreement
from trainer.rundir.records import CommitRef, StepLine
from trainer.rundir.rundir import RunDirectory
from trainer.settings import Settings
from trainer.steplog import StepLog
from trainer.watchdog import Watchdog

DELIVERY_SECONDS = 30.0  # that a run which has reached its target waits for a profile to be written


@dataclass
class Loop:
    """Trains one start from `step` on. Every process runs the same loop; rank 0 alone has a step log."""

    gang: Gang
    rundir: RunDirectory
    attempt: int
    start: int
    recipe: Recipe
    settings: Settings
    state: Any
    step: int
    batches: Iterator[tuple[int, Any]]  # (t, batch on the devices), from t = step on
    train_step: Callable[[Any, Any], tuple[Any, Any]]
    evaluator: Evaluator
    digest: Callable[[Any], dict[str, int]]
    sync_point: Callable[[int], bool]
    agreement: Agreement
    profiles: Profiles
    committer: Committer
    monitor: Monitor
    watchdog: Watchdog
    steplog: StepLog | None
    guard: Guard | None = None
    flops_per_second_peak: float | None = None
    flops_per_step: float = 0.0
    _pending: tuple[int, Any, float] | None = None  # step, its metrics, seconds waited for its batch
    _waited: float = 0.0
    _looked_at: float = field(default_factory=time.monotonic)
    _step_seconds: float = 0.0
    _told_at: float = 0.0
    _begun: int = -1

    def run(self) -> End:
        """Until the target is committed, or SIGTERM. Raises NonFiniteLoss, and whatever ends a process otherwise."""
        target = self.settings.target_step
        self._begun = self.step
        self._looked_at = time.monotonic()
        self.monitor.enter("Training")
        for t, batch in self._waited_for():
            assert t == self.step, f"batch {t} cannot train step {self.step}"
            with self.profiles.step(self.step + 1):
                self.state, metrics = self.train_step(self.state, batch)
            self.step += 1
            self._look()
            self._pending = (self.step, metrics, self._waited)
            stopping = self.sync_point(self.step)
            asked = self.agreement.reached(self.step)
            if self.profiles.ends_with(self.step) or (self.step == target and self.profiles.taking):
                self._end_profile()
            if self.step == target:
                self._look()
                return self._finish()
            if stopping:
                self._look()
                return self._preempted()
            if asked or self.step % self.settings.commit_every == 0:
                self._look()
                self._commit()
            if (order := self.profiles.due()) is not None:
                self._begin_profile(order)
        raise AssertionError("the loader ended; epochs follow one another without end")

    # --- profiles: whole steps, so the devices are idle where one begins and ends

    def _begin_profile(self, order: Order) -> None:
        self._settle()
        self.profiles.begin(order)
        self._looked_at = time.monotonic()

    def _end_profile(self) -> None:
        self._settle()
        self.profiles.end(self.step)
        self._looked_at = time.monotonic()

    def _settle(self) -> None:
        """Wait until all that was handed to the devices is done."""
        import jax

        self._look()
        jax.block_until_ready(self.state)

    # --- numbers

    def _waited_for(self) -> Iterator[tuple[int, Any]]:
        """The batches; how long each let us wait is in `_waited`."""
        while True:
            began = time.monotonic()
            item = next(self.batches, None)
            if item is None:
                return
            self._waited = time.monotonic() - began
            yield item

    def _look(self) -> None:
        """Fetch the metrics of the step before; they are finished or nearly so."""
        if self._pending is None:
            return
        import jax

        from trainer.digest import hash_text

        step, metrics, waited = self._pending
        self._pending = None
        got = jax.device_get(metrics)
        now = time.monotonic()
        seconds, self._looked_at = now - self._looked_at, now
        self._step_seconds = seconds
        loss = float(got["loss"])
        if not math.isfinite(loss):
            last = self.committer.committed
            raise NonFiniteLoss(
                f"the loss of step {step} (batch {step - 1}) is {loss}; nothing of it was committed, the run stands at "
                f"{last if last else 'its initial state'}. Lower the schedule's peak, or look at batch {step - 1}: "
                f"ids hash {hash_text(got['ids_hash'])}"
            )
        line = StepLine(
            step=step,
            loss=loss,
            grad_norm=float(got["grad_norm"]),
            lr=float(got["lr"]),
            skipped=bool(got["skipped"]),
            ids=hash_text(got["ids_hash"]),
            data=hash_text(got["data_hash"]),
            seconds=round(seconds, 6),
            loading=round(waited, 6),
        )
        if self.steplog is not None:
            self.steplog.add(line)
        if self.guard is not None:
            self.guard.stepped(line)
        self.watchdog.beat(f"step {step + 1}", training=True)
        if self.gang.processes > 1 and now - self._told_at >= self.settings.progress_seconds:
            self._told_at = now
            self.gang.tell("seconds", str(line.seconds))
        self._tell(line)

    def _tell(self, line: StepLine) -> None:
        monitor = self.monitor
        monitor.step, monitor.loss, monitor.step_seconds = line.step, line.loss, line.seconds
        monitor.skipped_steps += line.skipped
        monitor.pace.stepped(line.seconds)
        if line.seconds > 0:
            monitor.tokens_per_second = self.recipe.global_batch * self.recipe.sequence_length / line.seconds
            if self.flops_per_second_peak:
                monitor.mfu = self.flops_per_step / line.seconds / self.flops_per_second_peak
        monitor.stepped()

    # --- commits

    def _ref(self) -> CommitRef:
        return CommitRef(attempt=self.attempt, start=self.start, step=self.step)

    def _begin(self, gate: threading.Event | None = None) -> None:
        """Begin the save of the current step; on return the state may be donated again."""
        self.monitor.enter("Saving")
        self.watchdog.beat(f"the save of step {self.step}")
        self.committer.begin(self._ref(), self.state, self.digest(self.state), gate)
        self._begun = self.agreement.begun = self.step
        self.watchdog.beat(f"step {self.step + 1}")

    def _commit(self) -> None:
        """A commit on the way: the save goes on while the next steps run."""
        self._begin()
        if parts := due(self.recipe, self.settings, self.step):
            self._evaluate(parts)
        self.monitor.enter("Training")
        self._looked_at = time.monotonic()

    def _evaluate(self, parts: list[str]) -> None:
        if self.profiles.taking:
            self._end_profile()  # a trace of an evaluation would be a long one
        self.monitor.enter("Evaluating")
        ref, by = self._ref(), f"{self.attempt}.{self.start}"
        body = evaluate_commit(self.evaluator, self.state.params, parts, ref, self.gang, self.rundir.store, by)
        if self.guard is not None and body is not None and "loss" in body:
            self.guard.evaluated(ref, body["loss"], body["targets"])

    def _finish(self) -> End:
        """The target: its evaluation is written before its commit, since nothing starts again after that."""
        if parts := due(self.recipe, self.settings, self.step):
            gate = threading.Event()
            self._begin(gate)
            self._evaluate(parts)
            gate.set()
        else:
            self._begin()
        self.monitor.enter("Saving")
        self._committed_by_all("done")
        self._look_back()
        self.profiles.drain(DELIVERY_SECONDS)
        self.monitor.enter("Done")
        return End(int(ExitCode.DONE), f"step {self.step} is committed: the target is reached")

    def _committed_by_all(self, key: str) -> None:
        """Wait until nothing is in flight here, and until rank 0 has committed."""
        self.committer.drain()
        self.gang.decide(f"committed/{key}", "")

    def _look_back(self) -> None:
        """What the guard has not looked at yet: after the commit, which cannot wait."""
        if self.guard is not None:
            self.guard.finish()

    def _preempted(self) -> End:
        """SIGTERM: commit this step, if it is not begun already and if there is time for it."""
        self.monitor.enter("Exiting")
        if self._begun != self.step:
            left = self.settings.grace_seconds - 2 * self._step_seconds
            need = self.committer.save_seconds
            say = str(need <= left) if self.gang.rank == 0 else None
            if self.gang.decide("preempted", say) == str(True):
                self._begin()
                self.monitor.enter("Saving")
            else:
                self.committer.drain()
                why = f"a save takes {need:.1f} s and {max(left, 0):.1f} s of the grace are left"
                return End(int(ExitCode.PREEMPTED), f"SIGTERM at step {self.step}: no save begun, {why}")
        self._committed_by_all("preempted")
        self._look_back()
        return End(int(ExitCode.PREEMPTED), f"SIGTERM: step {self.step} is committed")
