"""Which replica of the operator works: a Lease in coordination.k8s.io, renewed by its holder.

It saves double work and nothing else. Two holders at once (a stopped one that wakes up, clocks that run at different
rates) do no harm: HEAD decides. Whether a holder is gone is judged by "the Lease did not change for its duration on my
own monotonic clock"; the times in it are for people.
"""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

import structlog

from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.clusters.kubernetes_api import JSON, READ_SECONDS, ApiError, Object

DURATION_SECONDS = 15
RENEW_SECONDS = 5.0
WATCH_SECONDS = 2.0  # how often a replica that waits looks
# A holder that has not renewed for this long stops working, before anyone else begins. One that gets no answer goes on
# in the meantime: it cannot decide anything without the API server, but it can say so.
DEADLINE_SECONDS = 10.0
ANSWER_SECONDS = 4.0


class Requests(Protocol):
    """orchestrator.clusters.kubernetes_api.KubernetesApi, as far as it is needed here."""

    def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = JSON,
        read_seconds: float = READ_SECONDS,
    ) -> Object: ...


class Lease:
    """Our side of the Lease `name`. `turn` is called again and again by one thread; `leads` by any."""

    def __init__(
        self,
        api: Requests,
        namespace: str,
        name: str,
        identity: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.identity = identity
        self._api = api
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._monotonic = monotonic
        self._clock = clock
        self._ours: Object | None = None  # the Lease as we last wrote it
        self._renewed = float("-inf")  # or when the API server, asked to renew, did not answer
        self._seen: object = None  # holder and renewal of another's Lease
        self._since = 0.0
        self._forbidden = False
        self._log = structlog.get_logger().bind(lease=f"{namespace}/{name}", identity=identity)

    @property
    def leads(self) -> bool:
        """Whether this replica works now."""
        return self._forbidden or self._monotonic() - self._renewed < DEADLINE_SECONDS

    def turn(self) -> float:
        """Renew, take, or look who has it; returns after how many seconds to come again. Never raises for the API."""
        led = self.leads
        try:
            self._renew() if self._ours is not None else self._look()
            self._forbidden = False
        except ClusterUnavailable as error:
            self._log.warning("no answer about the lease", error=str(error))
            if led and self._ours is not None:
                self._renewed = self._monotonic()
            return WATCH_SECONDS
        except ApiError as error:
            self._ours, self._renewed = None, float("-inf")  # somebody else has it, or it is gone
            if error.status == 403 and not self._forbidden:
                # Without the right we cannot know who works; working is safe, doing nothing is not.
                self._forbidden = True
                self._log.error("working without the lease", error=str(error), fix="Helm value rbac.create: true")
            elif error.status not in (403, 404, 409):
                self._log.error("the lease was refused", error=str(error))
        if self.leads != led:
            self._log.info("leading" if self.leads else "not leading any more")
        return RENEW_SECONDS if self.leads else WATCH_SECONDS

    def release(self) -> None:
        """Give it back, so that another replica begins at once. Errors do not matter: it expires."""
        if self._ours is None:
            return
        try:
            body = self._body(self._ours, "")
            body["spec"]["leaseDurationSeconds"] = 1
            self._ask("PUT", f"{self._collection}/{self._name}", body)
        except (ApiError, ClusterUnavailable) as error:
            self._log.warning("the lease was not released", error=str(error))
        self._ours, self._renewed = None, float("-inf")

    def run(self, stopping: threading.Event) -> None:
        """Turns until `stopping` is set."""
        pause = 0.0
        while not stopping.wait(pause):
            pause = self.turn()

    def _renew(self) -> None:
        assert self._ours is not None
        self._write(self._ours)

    def _look(self) -> None:
        try:
            found = self._ask("GET", f"{self._collection}/{self._name}")
        except ApiError as error:
            if error.status != 404:
                raise
            self._create()
            return
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        seen = (holder, spec.get("renewTime"), found["metadata"].get("resourceVersion"))
        now = self._monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        silent = now - self._since >= float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)
        if holder in ("", self.identity) or silent:
            self._write(found)

    def _create(self) -> None:
        began = self._monotonic()
        metadata = {"name": self._name, "labels": {"app.kubernetes.io/managed-by": "untildone"}}
        empty = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
        self._ours = self._ask("POST", self._collection, self._body(empty, self.identity))
        self._renewed = began

    def _write(self, lease: Object) -> None:
        """Our name into `lease`, if nobody wrote in between. The renewal counts from before the call."""
        began = self._monotonic()
        body = self._body(lease, self.identity)
        self._ours = self._ask("PUT", f"{self._collection}/{self._name}", body)
        self._renewed = began

    def _ask(self, method: str, path: str, body: Object | None = None) -> Object:
        return self._api.request(method, path, body, read_seconds=ANSWER_SECONDS)

    def _body(self, lease: Object, holder: str) -> Object:
        now = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = lease.get("spec") or {}
        moved = holder != (old.get("holderIdentity") or "")
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": DURATION_SECONDS,
            "renewTime": now,
            "acquireTime": now if moved else old.get("acquireTime", now),
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (moved and bool(holder)),
        }
        return {**lease, "spec": spec}
