"""Events of TrainingRuns. Whether one could be written never matters to the run."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from orchestrator.api import API_VERSION, TrainingRun
from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.clusters.kubernetes_api import ApiError, Object
from orchestrator.daemon import Look
from orchestrator.operating.happenings import Happening, happenings, told_before
from orchestrator.operating.lease import Requests
from orchestrator.status import RunStatus

COMPONENT = "untildone.dev/operator"


class Teller:
    """Tells what happens to one run, each thing once. `written` is the status the run had when we found it."""

    def __init__(
        self, api: Requests, instance: str, written: RunStatus | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._api = api
        self._instance = instance
        self._written = written
        self._clock = clock
        self._told: set[str] = set()
        self._log = structlog.get_logger()

    def tell(self, run: TrainingRun, look: Look) -> None:
        """Write an Event for everything new in `look`. To be called before the status that shows it is written."""
        for happening in happenings(run, look):
            if happening.what in self._told:
                continue
            self._told.add(happening.what)
            if not told_before(happening, self._written):
                self._write(run, happening)

    def _write(self, run: TrainingRun, happening: Happening) -> None:
        event = event_of(run, happening, self._instance, self._clock())
        path = f"/api/v1/namespaces/{run.metadata.namespace}/events"
        log = self._log.bind(run=run.name, namespace=run.metadata.namespace, reason=happening.reason)
        try:
            self._api.request("POST", path, event)
        except ApiError as error:
            if error.status != 409:  # 409: told already, by us before a restart or by another operator
                log.warning("an event was refused", error=str(error))
        except ClusterUnavailable as error:
            log.info("an event was not written", error=str(error))


def event_of(run: TrainingRun, happening: Happening, instance: str, now: float) -> Object:
    """The Event as an object; `now` is UNIX seconds."""
    regarding = {
        "apiVersion": API_VERSION,
        "kind": "TrainingRun",
        "namespace": run.metadata.namespace,
        "name": run.name,
        "uid": run.metadata.uid,
    }
    labels = {"app.kubernetes.io/managed-by": "untildone", "untildone.dev/run": run.name}
    moment = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": happening.name(run), "namespace": run.metadata.namespace, "labels": labels},
        "involvedObject": regarding,
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
