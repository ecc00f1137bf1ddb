"""From a claimed start to the loop: restore while the step compiles and the data open, catch up, hand over SIGTERM."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from trainer import beginning
from trainer.alongside import Alongside
from trainer.checkpoint import Checkpoints
from trainer.commits import Committer
from trainer.compilation import Compilation
from trainer.data.loader import Loader
from trainer.data.mix import Mix
from trainer.data.order import BatchOrder
from trainer.departure import Departure, End
from trainer.distributed import Gang, Termination
from trainer.environment import GangEnvironment
from trainer.evaluate import Evaluator, due, evaluate_commit, has_result
from trainer.evaluation_settings import expand
from trainer.flops import flops_per_token
from trainer.guard import Guard
from trainer.log import log
from trainer.loop import Loop
from trainer.plan import filling
from trainer.profiles import Profiles
from trainer.progress import Monitor
from trainer.recipe import Recipe
from trainer.requests import Agreement, Requests, follow
from trainer.restore import Restored, Restorer
from trainer.rundir.claims import Claim
from trainer.rundir.records import AttemptSpec, CommitRecord, CommitRef, InitRecord
from trainer.rundir.rundir import RunDirectory
from trainer.steplog import StepLog
from trainer.versions import versions
from trainer.watchdog import Watchdog


@dataclass
class Training:
    """Everything a claimed start has in hand. Rank 0 alone has a claim, a step log and requests."""

    environment: GangEnvironment
    spec: AttemptSpec
    recipe: Recipe
    mesh: Any
    rundir: RunDirectory
    gang: Gang
    claim: Claim | None
    departure: Departure
    termination: Termination
    monitor: Monitor
    watchdog: Watchdog
    steplog: StepLog | None
    agreement: Agreement
    requests: Requests | None
    start: int
    mix: Mix
    held_out: Mix | None
    order: BatchOrder
    compilation: Compilation
    peak_flops: float | None
    _guard: Guard | None = None
    _pinned: InitRecord | None = None  # the commit of another run that this one began with, until it has its own

    def run(self, record: CommitRecord | None) -> End:
        """Restore `record` (or what stands in for it) and train until the target or SIGTERM."""
        from jax.experimental import multihost_utils

        from trainer.digest import state_digest

        settings = self.spec.settings
        expected = record.ref.step if record else 0
        data = self._open_data(expected)
        checkpoints = Checkpoints()
        restorer = Restorer(
            self.rundir, self.claim, self.gang, checkpoints, self.recipe, self.mesh, self.compilation.traced
        )
        restored = restorer.restore(record, settings.init_from)
        commit = restored.commit.ref if restored.commit else None
        self.monitor.step, self.monitor.committed_step = restored.step, commit.step if commit else 0
        if restored.step >= settings.target_step:
            return End(0, f"step {restored.step} is the initial state already, the target is {settings.target_step}")
        if restored.step != expected:  # a commit was set aside, or the initial state brought its counter along
            with suppress(Exception):  # where it is not read from, what is wrong with it does not matter
                data.result()[0].close()
            data = self._open_data(restored.step)
        loader, batches = data.result()
        self.watchdog.beat("compiling")
        self._pinned = restored.init
        self._hear_requests(restored.step)
        self.monitor.enter("Compiling")
        train_step = self.compilation.result()
        profiles = self._profiles(train_step)
        self._describe(restored)
        committer = Committer(
            self.rundir,
            self.claim,
            checkpoints,
            self.departure,
            steplog=self.steplog,
            fingerprint=self.recipe.fingerprint(),
            versions=versions(),
            keep=settings.keep,
            committed=commit,
            save_seconds=restored.commit.save_seconds if restored.commit else 0.0,
            on_commit=self._committed,
            beat=self.watchdog.beat,
            phase_seconds=self.monitor.clock.seconds,
        )
        self._watch(commit)
        if commit is not None:
            self._catch_up(commit, restored.state)
        self.termination.hand_over()
        with loader:
            loop = Loop(
                gang=self.gang,
                rundir=self.rundir,
                attempt=self.spec.attempt,
                start=self.start,
                recipe=self.recipe,
                settings=settings,
                state=restored.state,
                step=restored.step,
                batches=self._on_devices(batches),
                train_step=train_step,
                evaluator=self._evaluator,
                digest=state_digest,
                sync_point=multihost_utils.reached_preemption_sync_point,
                agreement=self.agreement,
                profiles=profiles,
                committer=committer,
                monitor=self.monitor,
                watchdog=self.watchdog,
                steplog=self.steplog,
                guard=self._guard,
                flops_per_second_peak=self.peak_flops * self.mesh.size if self.peak_flops else None,
                flops_per_step=flops_per_token(self.recipe.model, self.recipe.sequence_length)
                * self.recipe.global_batch
                * self.recipe.sequence_length,
            )
            return loop.run()

    def _hear_requests(self, step: int) -> None:
        """Take part in commits and profiles that somebody asks for, from `step` on."""
        self.agreement.step = step
        if self.requests is not None:
            self.requests.start(self.spec.settings.progress_seconds, self.departure)
        else:
            follow(self.gang, self.agreement, self.departure)

    def _profiles(self, train_step: Any) -> Profiles:
        profiles = Profiles(
            gang=self.gang,
            rundir=self.rundir,
            attempt=self.spec.attempt,
            start=self.start,
            program=train_step.as_text,
            orders=self.agreement,
            patient=self.watchdog.patient,
        )
        if self.requests is not None:
            self.requests.dump = profiles.dump
        return profiles

    def _open_data(self, step: int) -> Alongside[tuple[Loader, Iterator[tuple[int, Any]]]]:
        """This process's loader from batch `step` on, and its batches, of which the first is read."""

        def work() -> tuple[Loader, Iterator[tuple[int, Any]]]:
            self.order.require(step, self.spec.settings.target_step)
            loader = Loader(self.mix, self.order, self.recipe, self.spec.plan, self.gang.rank, step)
            return loader, chain([next(loader)], loader)

        return Alongside("data", work)

    def _on_devices(self, batches: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        from trainer.sharding import put_batch

        for t, batch in batches:
            yield t, put_batch(batch, self.mesh)

    @cached_property
    def _evaluator(self) -> Evaluator:
        settings = self.spec.settings
        return Evaluator(
            recipe=self.recipe,
            plan=self.spec.plan,
            mesh=self.mesh,
            rank=self.gang.rank,
            data_root=settings.data_root,
            windows=self.held_out,
            sets=expand(settings.evaluation.sets),
            tokenizer=settings.evaluation.tokenizer,
            beat=self.watchdog.beat,
            patient=self.watchdog.patient,
        )

    def _catch_up(self, commit: CommitRef, state: Any) -> None:
        """Evaluate the restored commit if that is due and no start got to it."""
        parts = due(self.recipe, self.spec.settings, commit.step)
        if not parts:
            return
        missed = not has_result(self.rundir.store, commit) if self.gang.rank == 0 else None
        if self.gang.decide("catch-up", None if missed is None else str(missed)) != "True":
            return
        self.monitor.enter("Evaluating")
        by = f"{self.spec.attempt}.{self.start}"
        body = evaluate_commit(self._evaluator, state.params, parts, commit, self.gang, self.rundir.store, by)
        if body is not None:
            if self._guard is not None and "loss" in body:
                self._guard.evaluated(commit, body["loss"], body["targets"])
            log().info("evaluation caught up", step=commit.step)

    def _watch(self, commit: CommitRef | None) -> None:
        """Look, on process 0, at what is trained on."""
        if self.claim is None:
            return

        def tell(alarms: tuple[str, ...]) -> None:
            self.monitor.alarms = alarms

        same_text = self.spec.settings.held_out_same_text
        self._guard = Guard(self.rundir, self.order, self.spec.attempt, self.start, commit, tell, same_text)
        self._guard.begin()

    def _committed(self, ref: CommitRef) -> None:
        if self.gang.rank == 0:
            self.monitor.committed_step = ref.step
            if self.requests is not None:
                self.requests.committed()
            if self._guard is not None:
                self._guard.committed()
            if self._pinned is not None:
                beginning.pin(self._pinned, self.rundir.uri, 0)
                self._pinned = None
            log().info("committed", step=ref.step, start=f"{ref.attempt}.{ref.start}")

    def _describe(self, restored: Restored) -> None:
        if self.gang.rank:
            return
        from trainer.compile_cache import was_loaded

        plan, where = self.spec.plan, restored.commit.ref if restored.commit else "the initial state"
        log().info(
            f"start {self.spec.attempt}.{self.start} trains from {where} to step {self.spec.settings.target_step}",
            device_type=plan.device_type,
            devices=plan.devices,
            processes=plan.processes,
            per_device_batch=f"{plan.micro_batch} × {plan.accumulation} = {plan.per_device_batch}",
            global_batch=plan.global_batch,
            program="from the compile cache" if was_loaded("train_step") else "compiled",
        )
        if lost := filling(plan):
            log().warning(lost)
