"""One process of one start, from its environment to its end: join, agree, claim, restore, train, leave.

The order is the protocol's: nothing is written below attempts/<n>/<k>/ before the claim, HEAD is not read after it.
"""

import json
import queue
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import Any, NoReturn

from trainer.alongside import Alongside
from trainer.departure import PEER_LOST, Departure, End
from trainer.distributed import Gang, Identity, Termination, compare, join
from trainer.environment import GangEnvironment, prepare_jax
from trainer.errors import ConfigurationError, ExitCode
from trainer.hardware import device_type
from trainer.log import log
from trainer.plan import require_fit
from trainer.progress import Monitor, Pace, PhaseClock
from trainer.recipe import Recipe
from trainer.requests import Agreement, Requests, Signalled
from trainer.rundir.claims import Claim
from trainer.rundir.records import AttemptSpec, CommitRecord, ExitRecord, Progress, StartRecord
from trainer.rundir.rundir import RunDirectory
from trainer.steplog import StepLog
from trainer.versions import versions
from trainer.watchdog import Watchdog


def train(environment: GangEnvironment, began: float) -> NoReturn:
    """Run this process to its end; never returns. `began` is its start on the monotonic clock."""
    departure = Departure()
    try:
        departure.leave(Process(environment, departure, began).run())
    except BaseException as error:
        departure.fail(error)


class Process:
    """What one process knows; filled in as it goes."""

    def __init__(self, environment: GangEnvironment, departure: Departure, began: float) -> None:
        self.environment = environment
        self.rank = environment.process_id
        self.departure = departure
        self.clock = PhaseClock(began)
        self.termination = Termination(self._terminated)
        self.signalled: queue.SimpleQueue[Signalled] = queue.SimpleQueue()
        signal.signal(signal.SIGUSR1, lambda *_: self.signalled.put("profile"))
        signal.signal(signal.SIGUSR2, lambda *_: self.signalled.put("dump"))
        self.rundir: RunDirectory | None = None
        self.gang: Gang | None = None
        self.start: int | None = None
        self.monitor: Monitor | None = None
        self.steplog: StepLog | None = None
        self.requests: Requests | None = None
        self.stacks: bytes = b""
        # In this order: why we end is on record before the others hear of it, and they are gone before we are.
        for name, hook in (
            ("line", self._say),
            ("exit record", self._record_exit),
            ("gang", self._tell_peers),
            ("step log", self._flush_log),
            ("requests", self._answer_requests),
            ("progress", self._last_progress),
            ("peers", self._await_peers),
        ):
            departure.before_leaving(name, hook)

    # --- the story

    def run(self) -> End:
        environment = self.environment
        self.rundir = rundir = RunDirectory.open(environment.run_directory)
        spec, recipe = read_orders(rundir, environment)
        settings, plan = spec.settings, spec.plan
        device = device_type(plan.device_type)
        watchdog = Watchdog(settings.hang_start_seconds, settings.hang_step_seconds, self._hung)
        watchdog.start()
        self.monitor = monitor = Monitor(
            self.clock,
            settings.progress_seconds,
            self._put_progress,
            settings.target_step,
            line=self.rank == 0,
            pace=Pace(settings.commit_every, settings.evaluate_every),
        )
        if self.rank == 0:
            monitor.start()
        given = recipe.data.held_out or settings.evaluation.sets or settings.evaluation.tasks
        if settings.evaluate_every and not given and self.rank == 0:
            log().warning(
                "settings.evaluate_every is set, but the recipe has no data.held_out, and settings.evaluation names "
                "neither sets nor tasks: nothing is evaluated"
            )

        from trainer.data.mix import Mix
        from trainer.data.order import open_order

        mix, order = Mix(recipe, settings.data_root), open_order(recipe, rundir.store)
        held_out = Mix(recipe, settings.data_root, "held_out") if recipe.data.held_out else None
        if self.rank == 0:
            mix.check()
            if held_out is not None:
                held_out.check()
            from trainer.data.held_out import check_start
            from trainer.evaluate import check_tasks

            check_tasks(recipe, settings)
            check_start(rundir, spec, recipe)

        prepare_jax(plan, settings.compile_cache, device.family)
        import jax

        from trainer.compile_cache import install

        install()
        imports = Alongside("imports", _import_late_ones)
        self.gang = gang = join(
            environment.coordinator,
            environment.process_count,
            self.rank,
            settings.heartbeat_timeout_seconds,
            settings.hang_start_seconds,
        )
        gang.listen(lambda code, reason: self.departure.leave(End(code, reason, cascade=True)))
        watchdog.beat("agreeing")
        self._agree(
            Identity(spec.attempt, environment.nonce, recipe.fingerprint(), spec.image, environment.process_count)
        )
        # Modules that come while JAX traces change what its caches find, and so the program: see trainer.compilation.
        imports.result()
        from trainer.compilation import Compilation
        from trainer.sharding import make_mesh

        mesh = make_mesh(plan, recipe)
        # From here on beside everything else; also while an attempt that HEAD does not name yet waits for its turn.
        compilation = Compilation(recipe, plan, mesh)
        claim, record = self._claim(rundir, gang)
        watchdog.beat("restoring")
        committed = record.ref.step if record else 0
        agreement = Agreement(committed)
        self.requests = Requests(claim, rundir, gang, agreement, self.signalled) if claim is not None else None
        if committed >= settings.target_step:
            monitor.committed_step = monitor.step = committed
            monitor.enter("Done")
            return End(
                int(ExitCode.DONE), f"step {committed} is committed already, the target is {settings.target_step}"
            )

        if claim is not None:
            self._record_start(claim, spec, recipe, jax)
            self.steplog = StepLog(claim.append_step_log)
            threading.Thread(target=self._keep_log, args=(settings.log_seconds,), name="steplog", daemon=True).start()
        if gang.processes > 1:
            monitor.peers = lambda: [float(text) for text in gang.told("seconds")]

        from trainer.training import Training

        monitor.enter("Restoring")
        training = Training(
            environment=environment,
            spec=spec,
            recipe=recipe,
            mesh=mesh,
            rundir=rundir,
            gang=gang,
            claim=claim,
            departure=self.departure,
            termination=self.termination,
            monitor=monitor,
            watchdog=watchdog,
            steplog=self.steplog,
            agreement=agreement,
            requests=self.requests,
            start=self.start or 0,
            mix=mix,
            held_out=held_out,
            order=order,
            compilation=compilation,
            # CPUs that stand in for TPUs have no peak worth dividing by.
            peak_flops=None if jax.devices()[0].platform == "cpu" else device.peak_flops_per_device,
        )
        return training.run(record)

    def _agree(self, mine: Identity) -> None:
        """All processes belong together, or all end with 79."""
        assert self.gang is not None
        said = self.gang.gather("join", json.dumps(asdict(mine)))
        if said is not None:
            compare([Identity(**json.loads(text)) for text in said])
        self.gang.decide("joined", "")

    def _claim(self, rundir: RunDirectory, gang: Gang) -> tuple[Claim | None, CommitRecord | None]:
        """Rank 0 claims; all get the start's number and the record of the commit in the claim's own body."""
        environment, claim, told = self.environment, None, None
        if gang.rank == 0:
            claim = rundir.claim(
                environment.attempt,
                environment.nonce,
                environment.pod_uid,
                environment.restart_attempt,
                stop=lambda: self.termination.seen,
            )
            record = rundir.read_commit(claim.restore) if claim.restore else None
            told = json.dumps({"start": claim.start, "commit": record.model_dump(mode="json") if record else None})
        said = json.loads(gang.decide("claim", told))
        self.start = said["start"]
        commit = CommitRecord.parse(said["commit"], "commit record from process 0") if said["commit"] else None
        return claim, commit

    def _record_start(self, claim: Claim, spec: AttemptSpec, recipe: Recipe, jax: Any) -> None:
        assert self.rundir is not None
        self.rundir.create_start(
            StartRecord(
                attempt=claim.attempt,
                start=claim.start,
                pod_uid=self.environment.pod_uid,
                restart_attempt=self.environment.restart_attempt,
                processes=jax.process_count(),
                devices=jax.device_count(),
                device_kind=jax.devices()[0].device_kind,
                restored=claim.restore,
                versions=versions(),
                fingerprint=recipe.fingerprint(),
                settings=spec.settings,
                plan=spec.plan,
                time=time.time(),
            )
        )

    # --- threads and ends

    def _put_progress(self, progress: Progress) -> None:
        assert self.rundir is not None
        if self.start is None:
            self.rundir.put_pod_progress(self.environment.attempt, self.environment.pod_uid, progress)
        else:
            self.rundir.put_progress(self.environment.attempt, self.start, progress)

    def _keep_log(self, every: float) -> None:
        assert self.steplog is not None
        while True:
            time.sleep(max(every - self.steplog.seconds_since_flush, every / 10))
            if self.steplog.seconds_since_flush >= every:
                try:
                    self.steplog.flush()
                except Exception as error:  # the lines stay; the commit that needs them will say so
                    log().warning("the step log could not be written; trying again", error=str(error))

    def _terminated(self) -> None:
        self.departure.leave(End(int(ExitCode.PREEMPTED), "SIGTERM before training began"))

    def _hung(self, message: str, stacks: bytes) -> None:
        self.stacks = stacks
        self.departure.leave(End(int(ExitCode.WATCHDOG), message, traceback=stacks.decode(errors="replace")[-20000:]))

    def _say(self, end: End) -> None:
        if self.rank == 0 or not end.cascade:
            level = log().info if end.code in (ExitCode.DONE, ExitCode.PREEMPTED) else log().error
            level("leaving", code=end.code, reason=end.reason, rank=self.rank)
            if end.code == ExitCode.APPLICATION_ERROR:
                print(end.traceback, file=sys.stderr)

    def _record_exit(self, end: End) -> None:
        """Everybody writes about its own failure; of the ends that all share, process 0 writes."""
        if self.rundir is None or (self.rank and end.cascade):
            return
        attempt, pod = self.environment.attempt, self.environment.pod_uid
        record = ExitRecord(
            code=end.code,
            reason=end.reason,
            error=end.error,
            traceback=end.traceback,
            phase=self.clock.phase,
            step=self.monitor.step if self.monitor else None,
            signal_seen=self.termination.seen or end.code == ExitCode.PREEMPTED,
            rank=self.rank,
            time=time.time(),
        )
        if self.start is None:
            self.rundir.put_pod_exit(attempt, pod, record)
            return
        if self.stacks:
            self.rundir.store.put(f"attempts/{attempt}/{self.start}/stacks/rank{self.rank}.txt", self.stacks)
        self.rundir.put_exit(attempt, self.start, record)

    def _tell_peers(self, end: End) -> None:
        if self.gang is not None:
            self.gang.stop(end.code, end.reason)

    def _last_progress(self, end: End) -> None:
        if self.monitor is not None and self.rank == 0:
            self.monitor.write_now()

    def _await_peers(self, end: End) -> None:
        if self.gang is not None and end.code != PEER_LOST:
            self.gang.leave()

    def _answer_requests(self, end: End) -> None:
        """Whoever asked for a commit while the last one was made; and for a profile that will never be."""
        if self.requests is not None and end.code != ExitCode.FENCED:
            self.requests.look()
            if end.code == ExitCode.DONE:
                self.requests.close()

    def _flush_log(self, end: End) -> None:
        if self.steplog is not None and end.code != ExitCode.FENCED:
            self.steplog.flush()


def read_orders(rundir: RunDirectory, environment: GangEnvironment) -> tuple[AttemptSpec, Recipe]:
    """Spec and recipe of the attempt. Raises ConfigurationError when they are missing or do not fit."""
    spec, stored = rundir.read_spec(environment.attempt), rundir.read_recipe()
    if spec is None:
        missing = f"attempts/{environment.attempt}/spec.json"
        raise ConfigurationError(f"{rundir.uri} has no {missing}: submit attempt {environment.attempt} first")
    if stored is None:
        raise ConfigurationError(f"{rundir.uri} has no recipe.json; the first attempt's submission writes it")
    if stored.fingerprint != stored.recipe.fingerprint():
        raise ConfigurationError(
            f"recipe.json of {rundir.uri} has fingerprint {stored.fingerprint[:12]}, but this version of the trainer "
            f"reads it as {stored.recipe.fingerprint()[:12]}: it would train something else; "
            "use the version that began the run"
        )
    if spec.plan.processes != environment.process_count:
        raise ConfigurationError(
            f"UNTILDONE_PROCESS_COUNT is {environment.process_count}, but the plan of attempt {environment.attempt} "
            f"({spec.plan.device_type}) has {spec.plan.processes} processes"
        )
    require_fit(spec.plan, stored.recipe)
    return spec, stored.recipe


def _import_late_ones() -> None:
    """What takes half a second and is not needed before the processes have met."""
    import grain  # noqa: F401
    import orbax.checkpoint  # noqa: F401

    import trainer.compilation
    import trainer.training  # noqa: F401
