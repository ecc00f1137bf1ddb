"""What the operator may do in a cluster, and what each right is for. The chart's roles say the same; a test compares.

Whoever adds a call to the API server adds its verb here, and in helm/untildone/templates/_rules.tpl.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.clusters.kubernetes_api import KubernetesApi

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class Scope(StrEnum):
    """Where a right is needed."""

    RUNS = "runs"  # in each namespace whose runs are looked after
    CLUSTER = "cluster"
    OWN = "own"  # in the operator's own namespace


@dataclass(frozen=True)
class Right:
    """Verbs on one kind of object. `name`: on that object alone. `optional`: without it less is known."""

    group: str
    resource: str  # with its subresource, if any: trainingruns/status
    verbs: tuple[str, ...]
    scope: Scope
    purpose: str
    name: str | None = None
    optional: bool = False

    @property
    def kind(self) -> str:
        """As a person says it: "workloads.kueue.x-k8s.io", "pods"."""
        return f"{self.resource}.{self.group}" if self.group else self.resource


READ = ("list", "watch")

LEASE = "<lease>"  # stands for the name of the operator's Lease

RIGHTS = (
    Right("untildone.dev", "trainingruns", READ, Scope.RUNS, "what is wanted"),
    Right("untildone.dev", "trainingruns/status", ("patch",), Scope.RUNS, "to say how it is going"),
    Right(
        "untildone.dev",
        "trainingruns/finalizers",
        ("update",),
        Scope.RUNS,
        "to own JobSets, where the API server checks that (OwnerReferencesPermissionEnforcement)",
    ),
    Right("jobset.x-k8s.io", "jobsets", ("create", "delete", "get", *READ), Scope.RUNS, "the attempts"),
    Right("kueue.x-k8s.io", "workloads", READ, Scope.RUNS, "queueing, admission and eviction of an attempt"),
    Right("kueue.x-k8s.io", "localqueues", READ, Scope.RUNS, "which ClusterQueue a run draws on"),
    Right("", "pods", READ, Scope.RUNS, "how the trainers are and how they ended"),
    # Whoever may create JobSets can have any pod made: this gives nothing more.
    Right(
        "",
        "pods",
        ("create",),
        Scope.RUNS,
        "a dry run tells what is wrong with a pod before the run is accepted",
        optional=True,
    ),
    Right("", "configmaps", ("get",), Scope.RUNS, "recipes in ConfigMaps"),
    Right("", "events", ("create",), Scope.RUNS, "to tell what happened"),
    Right("", "namespaces", ("get",), Scope.CLUSTER, "its uid is the cluster's identity", name="kube-system"),
    Right("", "nodes", READ, Scope.CLUSTER, "host failures and maintenance", optional=True),
    Right("kueue.x-k8s.io", "clusterqueues", READ, Scope.CLUSTER, "free quota, for going up the ladder", optional=True),
    Right("kueue.x-k8s.io", "resourceflavors", READ, Scope.CLUSTER, "whose quota it is", optional=True),
    Right("coordination.k8s.io", "leases", ("create",), Scope.OWN, "which replica works"),
    Right("coordination.k8s.io", "leases", ("get", "update"), Scope.OWN, "which replica works", name=LEASE),
)


@dataclass(frozen=True)
class Missing:
    """A verb that the API server would refuse."""

    right: Right
    verb: str
    namespace: str | None  # None: in the whole cluster

    def __str__(self) -> str:
        where = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.right.kind}{where} ({self.right.purpose})"


def missing(api: KubernetesApi, namespaces: Iterable[str], own: str, lease: str | None) -> Iterator[Missing]:
    """The verbs that we lack, asked one by one. `namespaces` empty: all of them. `lease` None: no Lease is used.

    Raises ClusterUnavailable.
    """
    watched: list[str | None] = [*namespaces] or [None]
    for right in RIGHTS:
        if right.scope is Scope.OWN and lease is None:
            continue
        places: dict[Scope, list[str | None]] = {Scope.RUNS: watched, Scope.CLUSTER: [None], Scope.OWN: [own]}
        for namespace in places[right.scope]:
            for verb in right.verbs:
                if not _may(api, right, verb, namespace, lease):
                    yield Missing(right, verb, namespace)


def _may(api: KubernetesApi, right: Right, verb: str, namespace: str | None, lease: str | None) -> bool:
    resource, _, subresource = right.resource.partition("/")
    name = lease if right.name == LEASE else right.name
    wanted = {
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "verb": verb,
        "namespace": namespace or "",
        "name": name or "",
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in wanted.items() if value}},
    }
    return bool(api.request("POST", REVIEWS, body)["status"]["allowed"])
