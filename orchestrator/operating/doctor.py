"""Checks of an installation, each with its result and the fix: what `untildone doctor` and `helm test` ask."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.clusters.kubernetes_api import ApiError, KubernetesApi
from orchestrator.operating.configuration import Configuration, own_namespace
from orchestrator.operating.installed import absent_kinds, older_definition
from orchestrator.operating.rights import missing

Result = Literal["PASS", "WARN", "FAIL", "UNKNOWN"]
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. UNKNOWN: the cluster did not answer."""

    name: str
    result: Result
    message: str


def examine(api: KubernetesApi, configuration: Configuration, patience: float) -> Iterator[Check]:
    """All checks, one after another. Waits up to `patience` seconds to see an operator at work."""
    for name, look in (
        ("cluster", lambda: [Check("cluster", "PASS", f"answers; its uid is {api.cluster_uid}")]),
        ("kinds", lambda: _problems("kinds", absent_kinds(api), "JobSet and Kueue are there")),
        ("definition", lambda: _definition(api)),
        ("rights", lambda: _rights(api, configuration)),
        ("runDirectories", lambda: [_run_directories(configuration)]),
        ("operator", lambda: [_operator(api, configuration, patience)]),
    ):
        yield from _asked(name, look)


def _asked(name: str, look: Callable[[], list[Check]]) -> list[Check]:
    try:
        return look()
    except ClusterUnavailable as error:
        return [Check(name, "UNKNOWN", str(error))]
    except ApiError as error:
        return [Check(name, "FAIL", str(error))]


def _problems(name: str, problems: list[str], fine: str) -> list[Check]:
    return [Check(name, "FAIL", problem) for problem in problems] or [Check(name, "PASS", fine)]


def _definition(api: KubernetesApi) -> list[Check]:
    problem = older_definition(api)
    return _problems(
        "definition", [problem] if problem else [], "TrainingRun is served with every field of this version"
    )


def _rights(api: KubernetesApi, configuration: Configuration) -> list[Check]:
    lease = configuration.lease.name if configuration.lease.enabled else None
    own = configuration.lease.namespace or own_namespace()
    lacking = list(missing(api, configuration.watch_namespaces, own, lease))
    found = [Check("rights", "WARN" if item.right.optional else "FAIL", f"may not {item}") for item in lacking]
    return found or [Check("rights", "PASS", "every verb that the operator uses is allowed")]


def _run_directories(configuration: Configuration) -> Check:
    places = configuration.run_directories
    if not places:
        return Check("runDirectories", "WARN", "none: every run is refused; set the Helm value runDirectories")
    return Check("runDirectories", "PASS", f"for {', '.join(sorted(places))}")


def _operator(api: KubernetesApi, configuration: Configuration, patience: float) -> Check:
    """Whether somebody renews the Lease. Seen by its change, so that no two clocks are compared."""
    lease, namespace = configuration.lease, configuration.lease.namespace or own_namespace()
    if not lease.enabled:
        return Check("operator", "PASS", "works without a Lease, so whether it works is not looked at")
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease.name}"
    deadline = time.monotonic() + patience
    first: str | None = None
    while True:
        renewed, holder = _renewed(api, path)
        if renewed and first and renewed != first:
            return Check("operator", "PASS", f"{holder} renews the Lease {namespace}/{lease.name}")
        first = first or renewed
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    state = f"is not renewed; {holder} held it last" if first else "does not exist"
    logs = f"kubectl logs --namespace {namespace} --selector app.kubernetes.io/name=untildone"
    return Check("operator", "FAIL", f"the Lease {namespace}/{lease.name} {state}: no operator works; look at: {logs}")


def _renewed(api: KubernetesApi, path: str) -> tuple[str | None, str]:
    try:
        spec = api.request("GET", path).get("spec") or {}
    except ApiError as error:
        if error.status != 404:
            raise
        return None, ""
    return spec.get("renewTime"), str(spec.get("holderIdentity") or "nobody")
