"""An operator's keeper over the story's world: the API server in memory, preparation at once, time counted."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from orchestrator.api import TrainingRun
from orchestrator.clusters.base import Cluster, ClusterUnavailable
from orchestrator.clusters.kubernetes_api import ApiError
from orchestrator.operating.configuration import Configuration
from orchestrator.operating.keeper import Keeper, Surroundings
from orchestrator.operating.lease import Requests
from orchestrator.operating.preparation import Prepared
from tests.support.story import Faults, FaultyCluster, World, a_recipe, a_run
from trainer.rundir.disk import DiskStore
from trainer.rundir.rundir import RunDirectory

UID = "11111111-2222-3333-4444-555555555555"


@dataclass
class ApiServer:
    """Takes statuses by server-side apply, and Events, once per name."""

    statuses: list[dict[str, Any]] = field(default_factory=list)
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)  # names of Events, told or not
    away: bool = False
    asked: int = 0
    refuses: dict[str, int] = field(default_factory=dict)  # part of a path → HTTP status

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        self.asked += 1
        if self.away:
            raise ClusterUnavailable("connection refused")
        for part, status in self.refuses.items():
            if part in path:
                raise ApiError(status, "Forbidden", f"{path} is forbidden")
        if path.endswith("/events"):
            name = body["metadata"]["name"]
            self.tried.append(name)
            if name in self.events:
                raise ApiError(409, "AlreadyExists", f"events {name} already exists")
            self.events[name] = body
            return dict(body)
        assert (method, path.rpartition("/")[2]) == ("PATCH", "status"), path
        assert options["query"] == {"fieldManager": "untildone", "force": "true"}
        assert set(body) == {"apiVersion", "kind", "metadata", "status"}
        self.statuses.append(body["status"])
        return dict(body)

    @property
    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.events.values()]


class AtOnce(Executor):
    """Runs what is submitted before it returns; or, `held`, when it is told to."""

    def __init__(self) -> None:
        self.held = False
        self.waiting: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.held:
            self.waiting.append(fn)
        else:
            fn(*args, **kwargs)
        return Future()

    def go(self) -> None:
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()


class Kept:
    """A TrainingRun object, whoever looks after it, and the world they are in."""

    def __init__(self, world: World, **spec: Any) -> None:
        self.world = world
        self.server = ApiServer()
        self.threads = AtOnce()
        self.prepared: list[int] = []  # generations
        self.prepare: Callable[[TrainingRun], None] = lambda run: None  # may raise
        self.obj = a_run(world.folder, **spec).model_dump(mode="json", by_alias=True, exclude_unset=True)
        self.obj["metadata"] |= {"namespace": "ns", "uid": UID, "generation": 1}
        self.keeper = self.fresh()

    def fresh(self, identity: str = "operator-0") -> Keeper:
        """A keeper that remembers nothing, as in another operator process, of the object as it is now."""
        around = Surroundings(
            api=self.server,
            clusters=lambda _: FaultyCluster(self.world, Faults()),
            configuration=Configuration.parse({"runDirectories": {"*": [str(self.world.folder), "/nowhere"]}}, "t"),
            threads=self.threads,
            wake=lambda *_: None,
            cluster_uid=lambda: self.world.uid,
            identity=identity,
            clock=self.world.clock,
            monotonic=self.world.clock,
            prepare=self._prepare,
        )
        return Keeper(self.obj, around)

    def _prepare(self, run: TrainingRun, cluster: Cluster, _api: Requests, _before: bool) -> Prepared:
        self.prepared.append(run.metadata.generation or 0)
        self.prepare(run)
        store = DiskStore(self.world.folder)
        rundir = RunDirectory(store, patience_seconds=0.0, clock=self.world.clock, sleep=self.world.sleep)
        return Prepared(run, a_recipe(), cluster, rundir)

    def change(self, **spec: Any) -> None:
        """A user edits the spec."""
        self.obj = {**self.obj, "spec": {**self.obj["spec"], **spec}}
        self.obj["metadata"] = {**self.obj["metadata"], "generation": self.obj["metadata"]["generation"] + 1}

    def visit(self, keeper: Keeper | None = None) -> float | None:
        """One visit. The status that was written stands in the object afterwards."""
        pause = (keeper or self.keeper).visit(self.obj)
        if self.server.statuses:
            self.obj = {**self.obj, "status": self.server.statuses[-1]}
        return pause

    def until(self, look: Callable[[], bool], visits: int = 400) -> None:
        """Visit, and let time pass where that is what the keeper waits for."""
        for _ in range(visits):
            if look():
                return
            if self.visit() != 0.0:
                self.world.tick()
        raise AssertionError(f"not after {visits} visits: {self.word}: {self.obj.get('status', {}).get('message')}")

    def condition(self, kind: str) -> dict[str, Any]:
        found = [c for c in self.obj.get("status", {}).get("conditions", []) if c["type"] == kind]
        return found[0] if found else {}

    @property
    def word(self) -> str:
        return str(self.condition("Succeeded").get("reason", ""))
