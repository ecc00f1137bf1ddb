"""Whether the cluster has what this version needs: the kinds it uses, and every field of its own kind.

`helm upgrade` upgrades the CustomResourceDefinition; where it is installed by hand it can be older than the operator,
and the API server then drops the fields it does not know, silently. Read from the OpenAPI documents, which every
service account may read.
"""

from collections.abc import Iterator
from typing import Any

from orchestrator.clusters.kubernetes_api import ApiError, KubernetesApi
from orchestrator.crd import GROUP, PATH, PLURAL, VERSION, crd

KINDS = {
    "jobset.x-k8s.io/v1alpha2": ("jobsets", "install JobSet"),
    "kueue.x-k8s.io/v1beta2": (
        "workloads",
        "install a Kueue that serves v1beta2, with its integration jobset.x-k8s.io/jobset",
    ),
}
APPLY = f"kubectl apply --server-side -f {PATH}"


def absent_kinds(api: KubernetesApi) -> list[str]:
    """What is missing, each with the fix. Raises ClusterUnavailable."""
    return [
        f"{plural}.{group_version.replace('/', ' ')}: not served by this cluster; {fix}"
        for group_version, (plural, fix) in KINDS.items()
        if plural not in _resources(api, group_version)
    ]


def older_definition(api: KubernetesApi) -> str | None:
    """What is wrong with the CustomResourceDefinition of TrainingRun, with the fix. Raises ClusterUnavailable."""
    served = _resources(api, f"{GROUP}/{VERSION}")
    if not {PLURAL, f"{PLURAL}/status"} <= served:
        return f"{PLURAL}.{GROUP} {VERSION}: not served by this cluster; run: {APPLY}"
    lacking = sorted(set(_fields(_own_schema())) - set(_fields(_served_schema(api))))
    if lacking:
        shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        return (
            f"the CustomResourceDefinition {PLURAL}.{GROUP} is older than this version: it lacks {shown}; run: {APPLY}"
        )
    return None


def _resources(api: KubernetesApi, group_version: str) -> set[str]:
    try:
        found = api.request("GET", f"/apis/{group_version}")
    except ApiError as error:
        if error.status == 404:
            return set()
        raise
    return {str(resource["name"]) for resource in found.get("resources") or []}


def _own_schema() -> dict[str, Any]:
    schema: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return {key: schema["properties"][key] for key in ("spec", "status")}


def _served_schema(api: KubernetesApi) -> dict[str, Any]:
    document = api.request("GET", f"/openapi/v3/apis/{GROUP}/{VERSION}")
    schemas = document.get("components", {}).get("schemas", {})
    for schema in schemas.values():
        kinds = schema.get("x-kubernetes-group-version-kind") or []
        if any(kind.get("group") == GROUP and kind.get("kind") == "TrainingRun" for kind in kinds):
            properties: dict[str, Any] = schema.get("properties") or {}
            return {key: properties.get(key) or {} for key in ("spec", "status")}
    return {}


def _fields(schemas: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields."""
    for name, schema in schemas.items():
        yield prefix + name
        inner = schema.get("items") or schema
        yield from _fields(inner.get("properties") or {}, f"{prefix}{name}.")
