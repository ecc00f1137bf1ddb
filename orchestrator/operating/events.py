"""Events of TrainingRuns. Whether one could be written never matters to the run."""

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import structlog

from orchestrator.api import API_VERSION
from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.clusters.kubernetes_api import ApiError, Object
from orchestrator.operating.happenings import Happening, Subject, told_before
from orchestrator.operating.lease import Requests
from orchestrator.status import RunStatus

COMPONENT = "untildone.dev/operator"


class Teller:
    """Tells what happens to one run, each thing once. `written` is the status the run had when we found it."""

    def __init__(
        self,
        api: Requests,
        subject: Subject,
        instance: str,
        written: RunStatus | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._subject = subject
        self._instance = instance
        self._written = written
        self._clock = clock
        self._told: set[str] = set()
        self._log = structlog.get_logger().bind(run=subject.name, namespace=subject.namespace)

    def tell(self, happenings: Iterable[Happening]) -> None:
        """Write an Event for everything new. To be called before the status that shows it is written."""
        for happening in happenings:
            if happening.what in self._told:
                continue
            self._told.add(happening.what)
            if not told_before(happening, self._written):
                self._write(happening)

    def _write(self, happening: Happening) -> None:
        event = event_of(self._subject, happening, self._instance, self._clock())
        try:
            self._api.request("POST", f"/api/v1/namespaces/{self._subject.namespace}/events", event)
        except ApiError as error:
            if error.status != 409:  # 409: told already, by us before a restart or by another operator
                self._log.warning("an event was refused", reason=happening.reason, error=str(error))
        except ClusterUnavailable as error:
            self._log.info("an event was not written", reason=happening.reason, error=str(error))


def event_of(subject: Subject, happening: Happening, instance: str, now: float) -> Object:
    """The Event as an object; `now` is UNIX seconds."""
    moment = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    labels = {"app.kubernetes.io/managed-by": "untildone", "untildone.dev/run": subject.name}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": happening.name(subject), "namespace": subject.namespace, "labels": labels},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": "TrainingRun",
            "namespace": subject.namespace,
            "name": subject.name,
            "uid": subject.uid,
        },
        "reason": happening.reason,
        "message": happening.note,
        "type": "Warning" if happening.warning else "Normal",
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
        "source": {"component": "untildone", "host": instance[:128]},
        "reportingComponent": COMPONENT,
        "reportingInstance": instance[:128],
    }
