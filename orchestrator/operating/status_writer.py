"""Writes the status of one TrainingRun by server-side apply: at once when its state changes, else once a minute."""

import time
from collections.abc import Callable

import structlog

from orchestrator.api import API_VERSION
from orchestrator.clusters.kubernetes_api import APPLY_PATCH, ApiError
from orchestrator.operating.happenings import Subject
from orchestrator.operating.lease import Requests
from orchestrator.status import RunStatus, differs_materially

FIELD_MANAGER = "untildone"
QUIET_SECONDS = 60.0


class StatusWriter:
    """Of one object. `written` is what the API server has."""

    def __init__(
        self,
        api: Requests,
        subject: Subject,
        written: RunStatus | None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.written = written
        self._api = api
        self._subject = subject
        self._monotonic = monotonic
        self._at = float("-inf")
        self._refused: RunStatus | None = None  # what the API server did not take last
        self._log = structlog.get_logger()

    def write(self, status: RunStatus) -> float | None:
        """Write `status` if that is due; else after how many seconds it will be, None when there is nothing to write.

        Raises ClusterUnavailable when it is not known whether it was written.
        """
        if status == self.written:
            return None
        now = self._monotonic()
        news = differs(self._refused or self.written, status)
        if not news and now - self._at < QUIET_SECONDS:
            return self._at + QUIET_SECONDS - now
        self._at = now
        taken = self._send(status)
        self._refused = None if taken else status  # not sent again and again
        if taken:
            self.written = status
        return None if taken else QUIET_SECONDS

    def _send(self, status: RunStatus) -> bool:
        subject = self._subject
        metadata = {"name": subject.name, "namespace": subject.namespace, "uid": subject.uid}
        body = {"apiVersion": API_VERSION, "kind": "TrainingRun", "metadata": metadata, "status": status.to_object()}
        path = f"/apis/{API_VERSION}/namespaces/{subject.namespace}/trainingruns/{subject.name}/status"
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        try:
            self._api.request("PATCH", path, body, query=query, content_type=APPLY_PATCH)
        except ApiError as error:
            if error.status in (404, 409):  # the run is gone, or another one has its name
                return False
            fix = "Helm value rbac.create: true gives the right" if error.status == 403 else "upgrade the CRD"
            self._log.error("a status was refused", run=subject.name, error=str(error), fix=fix)
            return False
        return True


def differs(old: RunStatus | None, new: RunStatus) -> bool:
    """Whether `new` is news. A commit alone is none: there may be one every second."""
    if old is not None:
        old = old.model_copy(update={"committed_step": new.committed_step})
    return differs_materially(old, new)
