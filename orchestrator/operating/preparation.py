"""Makes an accepted spec ready to be looked after, beside the visits: the recipe is frozen, the data looked at.

Done once for each generation of a spec, in threads of their own, because it can take minutes. An outage is waited out;
a refusal is looked at again from time to time, since the cause may be a file that somebody mends.
"""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from urllib.parse import quote

import structlog

from orchestrator.api import ConfigMapKeyRef, TrainingRun
from orchestrator.clusters.base import Cluster, ClusterUnavailable
from orchestrator.clusters.kubernetes_api import ApiError
from orchestrator.operating.lease import Requests
from orchestrator.operating.tenancy import escapes
from orchestrator.planning import ladder
from orchestrator.preparing import STORE_PATIENCE_SECONDS, load_recipe, open_run
from orchestrator.reading import with_shared_data
from trainer.errors import ConfigurationError, StorageUnavailable, TrainerError
from trainer.freezing import freeze
from trainer.recipe import DataFile, Recipe
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import StoreMissing

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
LOOK_AGAIN_SECONDS = 300.0
# Looking at the data takes a process of its own, and its memory: one at a time.
_one_look = threading.Semaphore(1)


@dataclass(frozen=True)
class Prepared:
    """A spec that can be looked after."""

    run: TrainingRun
    recipe: Recipe
    cluster: Cluster
    rundir: RunDirectory


@dataclass(frozen=True)
class Wrong:
    """A spec that cannot: `message` names field and fix. `certain` is false where something only did not answer."""

    message: str
    certain: bool


Outcome = Prepared | Wrong


class Preparation:
    """Of one spec. `outcome` is None until there is one; `done` is called, from another thread, when there is news."""

    def __init__(
        self,
        prepare: Callable[[], Prepared],
        threads: Executor,
        done: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prepare = prepare
        self._threads = threads
        self._done = done
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._pause = FIRST_PAUSE_SECONDS
        self._again_at = float("-inf")
        self._running = False
        self._outcome: Outcome | None = None
        self._cancelled = False

    @property
    def outcome(self) -> Outcome | None:
        with self._lock:
            return self._outcome

    def advance(self) -> float | None:
        """Begin, or begin again, when that is due; else after how many seconds to ask. None: nothing more to do."""
        with self._lock:
            if isinstance(self._outcome, Prepared) or self._cancelled:
                return None
            if self._running:
                return None  # `done` will be called
            left = self._again_at - self._monotonic()
            if left > 0:
                return left
            self._running = True
        with contextlib.suppress(RuntimeError):  # the operator is about to end
            self._threads.submit(self._work)
        return None

    def reject(self, message: str) -> None:
        """What was prepared turned out to be refused by the run itself."""
        with self._lock:
            self._outcome = Wrong(message, certain=True)
            self._again_at = self._monotonic() + LOOK_AGAIN_SECONDS

    def cancel(self) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self._cancelled = True

    def _work(self) -> None:
        try:
            outcome: Outcome = self._prepare()
        except (StorageUnavailable, ClusterUnavailable) as error:
            outcome = Wrong(str(error), certain=False)
        except TrainerError as error:
            outcome = Wrong(str(error), certain=True)
        except Exception as error:
            structlog.get_logger().exception("a spec could not be prepared")
            outcome = Wrong(f"unexpected {type(error).__name__}: {error}; see the operator's log", certain=False)
        with self._lock:
            if isinstance(outcome, Wrong) and outcome.certain:
                pause = LOOK_AGAIN_SECONDS
            else:
                pause = self._pause
                self._pause = min(LONGEST_PAUSE_SECONDS, 2 * self._pause)
            self._outcome = outcome
            self._again_at = self._monotonic() + pause * random.uniform(0.8, 1.0)
            self._running = False
        self._done()


def prepare_spec(run: TrainingRun, cluster: Cluster, api: Requests, accepted_before: bool) -> Prepared:
    """Everything that is looked at before the first visit. `accepted_before`: another operator accepted this very spec.

    Raises ConfigurationError, StorageUnavailable, ClusterUnavailable.
    """
    recipe = load_recipe(run, lambda key: read_config_map(api, run.metadata.namespace or "", key))
    refused = escapes(recipe)
    if refused:
        raise ConfigurationError("; ".join(refused))
    recorded = _recorded(run.spec.run_directory)
    same = _with_sizes_of(recipe, recorded) if recorded is not None else None
    recipe = same if same is not None else freeze(recipe, run.spec.data.root)
    ladder(run, recipe)
    if not (accepted_before and recorded is not None):
        cluster.check(run)
    with contextlib.nullcontext() if recorded is not None else _one_look:
        return Prepared(run, with_shared_data(recipe), cluster, open_run(run, recipe))


def read_config_map(api: Requests, namespace: str, ref: ConfigMapKeyRef) -> str:
    """The text of one key. Raises ConfigurationError naming it, ClusterUnavailable."""
    where = f"spec.recipe.configMap {ref.name} in namespace {namespace}"
    try:
        found = api.request("GET", f"/api/v1/namespaces/{namespace}/configmaps/{quote(ref.name, safe='')}")
    except ApiError as error:
        if error.status == 404:
            raise ConfigurationError(
                f"{where}: there is no such ConfigMap; create it, with the recipe as key {ref.key}"
            ) from None
        if error.status == 403:
            raise ConfigurationError(
                f"{where}: not allowed: needed is the verb get on configmaps: {error.message} (Helm value rbac.create)"
            ) from None
        raise ConfigurationError(f"{where}: {error}") from None
    data = found.get("data") or {}
    if ref.key not in data:
        keys = ", ".join(sorted(data)) or "none"
        raise ConfigurationError(f"{where}: has no key {ref.key!r} (keys: {keys}); set spec.recipe.configMap.key")
    return str(data[ref.key])


def _recorded(uri: str) -> Recipe | None:
    """The recipe that the run began with, if it has begun."""
    try:
        found = RunDirectory.open(uri, patience_seconds=STORE_PATIENCE_SECONDS).read_recipe()
    except StoreMissing:
        return None
    return found.recipe if found is not None else None


def _with_sizes_of(recipe: Recipe, recorded: Recipe) -> Recipe | None:
    """`recipe` frozen as `recorded` was, if they name the same files: measuring thousands again takes minutes.

    The trainer compares the sizes with the files at each of its starts.
    """
    sizes = {file.path: file.bytes for file in (*recorded.data.files, *recorded.data.held_out)}
    if any(file.path not in sizes for file in (*recipe.data.files, *recipe.data.held_out)):
        return None

    def sized(files: tuple[DataFile, ...]) -> tuple[DataFile, ...]:
        return tuple(f if f.bytes is not None else f.model_copy(update={"bytes": sizes[f.path]}) for f in files)

    data = recipe.data.model_copy(update={"files": sized(recipe.data.files), "held_out": sized(recipe.data.held_out)})
    return recipe.model_copy(update={"data": data})
