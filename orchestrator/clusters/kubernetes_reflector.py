"""A copy of one kind of object, kept up to date by list and watch, that knows how old it is.

Not `kubernetes.informer.SharedInformer`: it does not say when it last heard from the server, so a dead connection looks
like a quiet cluster; it connects again without a pause after a refused connection; and it holds model objects. Here a
copy is believed only while the last good answer (a list, an event, a bookmark, a watch that ended in order) is young
and no error came after it. Everything is listed again after every watch of 25 s, so that an event that was lost, or a
deletion nobody reported, is made up for within that time.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.clusters.kubernetes_api import ApiError, Gone, KubernetesApi, Object

WATCH_SECONDS = 25
FRESH_SECONDS = 35.0
PAGE = 500
BACKOFF_SECONDS, BACKOFF_MAX_SECONDS = 0.2, 5.0
FORBIDDEN_SECONDS = 10.0  # rights are given by people

Key = tuple[str, str]  # (namespace or "", name)


@dataclass(frozen=True)
class Kind:
    """What to copy: `prune` keeps of an object what is looked at (None: nothing), `index` says how it is asked for."""

    group_version: str  # "v1", "jobset.x-k8s.io/v1alpha2"
    plural: str
    prune: Callable[[Object], Object | None]
    index: Callable[[Object], Key | None] = field(default=lambda _: None)
    selector: str = ""
    namespaced: bool = True

    def path(self, namespace: str | None) -> str:
        """Of the collection, in one namespace or in all."""
        root = f"/apis/{self.group_version}" if "/" in self.group_version else f"/api/{self.group_version}"
        return (
            f"{root}/namespaces/{namespace}/{self.plural}" if namespace and self.namespaced else f"{root}/{self.plural}"
        )

    @property
    def resource(self) -> str:
        """As RBAC names it: "jobsets.jobset.x-k8s.io"."""
        group = self.group_version.rpartition("/")[0]
        return f"{self.plural}.{group}" if group else self.plural


# (old, new): the pruned object before and after; None when it was not there, or is no more.
Change = Callable[[Object | None, Object | None], None]


class Reflector:
    """The objects of one kind, in one namespace or in all. `start` begins; `objects` and `indexed` are what is known.

    Objects are never changed in place, so that what was handed out stays as it was.
    """

    def __init__(
        self,
        api: KubernetesApi,
        kind: Kind,
        namespace: str | None = None,
        on_change: Change = lambda _old, _new: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self.namespace = namespace
        self.forbidden: str | None = None  # why nothing is known, when the right to read is missing
        self._api = api
        self._on_change = on_change
        self._clock = clock
        self._path = kind.path(namespace)
        self._lock = threading.Lock()
        self._objects: dict[Key, Object] = {}
        self._index: dict[Key, set[Key]] = {}
        self._good: float | None = None  # when the server last answered well
        self._error: str | None = None  # what came after that
        self._stopping = threading.Event()
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"{kind.plural}@{namespace or '*'}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End at the next opportunity; a watch that is open ends by itself."""
        self._stopping.set()

    # -- what is known

    def check(self) -> None:
        """Raises ClusterUnavailable, with the reason, when the copy cannot be believed."""
        with self._lock:
            good, error = self._good, self._error
        if error is not None:
            raise ClusterUnavailable(error)
        if good is None:
            raise ClusterUnavailable(f"{self.kind.plural} have not been read yet")
        if self._clock() - good > FRESH_SECONDS:
            raise ClusterUnavailable(f"nothing was heard about {self.kind.plural} for {self._clock() - good:.0f} s")

    def wait(self, seconds: float) -> bool:
        """Whether the first list, or the refusal of it, has come within so long."""
        with self._news:
            return self._news.wait_for(lambda: self._good is not None or self._error is not None, seconds)

    def objects(self) -> list[Object]:
        with self._lock:
            return list(self._objects.values())

    def get(self, name: str, namespace: str = "") -> Object | None:
        with self._lock:
            return self._objects.get((namespace, name))

    def indexed(self, key: Key) -> list[Object]:
        """The objects whose index is `key`."""
        with self._lock:
            return [self._objects[k] for k in self._index.get(key, ())]

    # -- what changes it

    def put(self, obj: Object) -> None:
        """An answer of the API server to a call of ours: what it says is known at once, unless it is older."""
        pruned = self.kind.prune(obj)
        if pruned is None:
            return
        with self._lock:
            old = self._objects.get(_key(pruned))
            if old is not None and _same(old, pruned) and _version(old) >= _version(pruned):
                return
            self._store(pruned)
        self._tell(old, pruned)

    def drop(self, name: str, namespace: str, uid: str) -> None:
        """The API server said that there is no such object."""
        with self._lock:
            old = self._objects.get((namespace, name))
            if old is None or old["metadata"]["uid"] != uid:
                return
            self._forget((namespace, name))
        self._tell(old, None)

    def refresh(self, selector: str, index: Key) -> None:
        """Ask the API server now about the objects with these labels: all there are under this index.

        Raises ClusterUnavailable.
        """
        try:
            answer = self._api.request("GET", self._path, query={"labelSelector": selector})
        except ApiError as error:
            raise ClusterUnavailable(self._refusal(error, "list")) from error
        found = answer.get("items") or []
        for item in found:
            self.put(item)
        present, version = {_key(item) for item in found}, int(answer["metadata"]["resourceVersion"])
        for old in self.indexed(index):
            if _key(old) not in present and _version(old) <= version:
                self.drop(old["metadata"]["name"], old["metadata"].get("namespace", ""), old["metadata"]["uid"])

    # -- the thread

    def _run(self) -> None:
        pause = BACKOFF_SECONDS
        while not self._stopping.is_set():
            began, most = self._clock(), BACKOFF_MAX_SECONDS
            try:
                self._watch(self._list())
                pause = BACKOFF_SECONDS
                continue
            except Gone:  # an answer like any other, but not one to be asked for again and again
                if self._clock() - began > BACKOFF_MAX_SECONDS:
                    pause = BACKOFF_SECONDS
            except ApiError as error:
                if error.status != 410:  # a list of several pages whose snapshot is too old by now
                    self._failed(self._refusal(error, "list, watch"), forbidden=error.status == 403)
                    most = FORBIDDEN_SECONDS
            except ClusterUnavailable as error:
                if self._clock() - began > WATCH_SECONDS:
                    pause = BACKOFF_SECONDS
                self._failed(f"{self.kind.plural}: {error}")
            except Exception as error:  # an object of a shape nobody thought of must not end the watching
                self._failed(f"{self.kind.plural}: {type(error).__name__}: {error}")
            self._stopping.wait(pause * random.uniform(0.5, 1.0))
            pause = min(most, pause * 2)

    def _list(self) -> str:
        """Replace everything by what there is; the resource version to watch from."""
        query = {"limit": str(PAGE)}
        if self.kind.selector:
            query["labelSelector"] = self.kind.selector
        found: dict[Key, Object] = {}
        while True:
            answer = self._api.request("GET", self._path, query=query)
            for item in answer.get("items") or []:
                pruned = self.kind.prune(item)
                if pruned is not None:
                    found[_key(pruned)] = pruned
            version, rest = str(answer["metadata"]["resourceVersion"]), answer["metadata"].get("continue")
            if not rest:
                break
            query["continue"] = rest
        changes: list[tuple[Object | None, Object | None]] = []
        with self._lock:
            for key, old in list(self._objects.items()):
                # Put there by a call of ours while the list was under way: the list does not know it yet.
                if key not in found and _version(old) <= int(version):
                    self._forget(key)
                    changes.append((old, None))
            for key, new in found.items():
                before = self._objects.get(key)
                if before is None or not _same(before, new) or _version(before) < _version(new):
                    self._store(new)
                    changes.append((before, new))
        self._heard()
        for before, after in changes:
            self._tell(before, after)
        return version

    def _watch(self, version: str) -> None:
        query = {"resourceVersion": version}
        if self.kind.selector:
            query["labelSelector"] = self.kind.selector
        for event in self._api.watch(self._path, query, WATCH_SECONDS):
            if self._stopping.is_set():
                return
            self._heard()
            if event["type"] != "BOOKMARK":
                self._apply(event["type"], event["object"])
        self._heard()

    def _apply(self, kind: str, obj: Object) -> None:
        pruned = self.kind.prune(obj)
        key = _key(obj)
        with self._lock:
            old = self._objects.get(key)
            if old is not None and _same(old, obj) and _version(old) > _version(obj):
                return
            if kind == "DELETED":
                if old is not None and not _same(old, obj):
                    return  # another one of this name has come already
                self._forget(key)
            elif pruned is not None:
                self._store(pruned)
        if kind == "DELETED":
            # Its last state first: how its containers ended may be news, and it comes with the deletion only.
            if pruned is not None:
                self._tell(old, pruned)
            self._tell(pruned or old, None)
        elif pruned is not None:
            self._tell(old, pruned)

    def _tell(self, old: Object | None, new: Object | None) -> None:
        if old is not None and new is not None and not _same(old, new):
            self._on_change(old, None)  # another one has its name now
            old = None
        if old is None or new is None or _content(old) != _content(new):
            self._on_change(old, new)

    def _store(self, obj: Object) -> None:
        key = _key(obj)
        if key in self._objects:
            self._forget(key)
        self._objects[key] = obj
        index = self.kind.index(obj)
        if index is not None:
            self._index.setdefault(index, set()).add(key)

    def _forget(self, key: Key) -> None:
        old = self._objects.pop(key, None)
        index = self.kind.index(old) if old is not None else None
        if index is not None and index in self._index:
            self._index[index].discard(key)
            if not self._index[index]:
                del self._index[index]

    def _heard(self) -> None:
        with self._lock:
            self._good, self._error, self.forbidden = self._clock(), None, None
        with self._news:
            self._news.notify_all()

    def _failed(self, error: str, forbidden: bool = False) -> None:
        with self._lock:
            self._error = error
            self.forbidden = error if forbidden else None
        with self._news:
            self._news.notify_all()

    def _refusal(self, error: ApiError, verbs: str) -> str:
        where = f"in namespace {self.namespace}" if self.namespace else "in all namespaces"
        if not self.kind.namespaced:
            where = "in the cluster"
        if error.status == 403:
            return f"not allowed: needed are the verbs {verbs} on {self.kind.resource} {where}: {error.message}"
        if error.status == 404:
            return f"the cluster does not know {self.kind.resource} {self.kind.group_version}: {error.message}"
        return f"{self.kind.resource}: {error}"


def _key(obj: Object) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _same(one: Object, other: Object) -> bool:
    return bool(one["metadata"]["uid"] == other["metadata"]["uid"])


def _version(obj: Object) -> int:
    """Kubernetes says of resource versions since 1.35 that they may be compared as numbers; etcd's always were."""
    return int(obj["metadata"]["resourceVersion"])


def _content(obj: Object) -> Object:
    """Without what changes at every write."""
    return {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k != "resourceVersion"}}
