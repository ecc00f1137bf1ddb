"""A small client of the Kubernetes API for the lab and its tests: JSON in, JSON out, no models.

Paths are the API's own (`/api/v1/nodes`); `path_of` gives them for whole objects. Not a client for the product: it
does not refresh credentials or know discovery.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml

JSON = "application/json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"
FIELD_MANAGER = "lab"
TIMEOUT = urllib3.Timeout(connect=5.0, read=30.0)
BUSY_SECONDS = 20.0

Object = dict[str, Any]


class ApiError(Exception):
    """An answer that is not success. `status` is HTTP's, `reason` Kubernetes' word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


class Api:
    """One API server, one identity. Safe to share between threads."""

    def __init__(self, server: str, certificate_authority: Path, token: str) -> None:
        self.server = server
        self._headers = {"Authorization": f"Bearer {token}", "Accept": JSON}
        self._pool = urllib3.PoolManager(maxsize=32, ca_certs=str(certificate_authority), retries=False)

    @classmethod
    def from_kubeconfig(cls, path: Path) -> "Api":
        """The first cluster and user of a kubeconfig as the lab writes it."""
        content = yaml.safe_load(path.read_text())
        cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
        return cls(cluster["server"], Path(cluster["certificate-authority"]), user["token"])

    def request(
        self,
        method: str,
        path: str,
        body: Object | str | None = None,
        kind: str = JSON,
        **query: str | bool,
    ) -> Object:
        """One call. Raises ApiError for every answer but success, urllib3's HTTPError when there is none.

        Asked again, as every client of Kubernetes does, where the answer is 429: too busy, or just come up.
        """
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            response = self._pool.request(
                method,
                self.server + path + _query(query),
                headers={**self._headers, "Content-Type": kind},
                body=body if isinstance(body, str) else None if body is None else json.dumps(body),
                timeout=TIMEOUT,
            )
            if response.status != 429 or time.monotonic() > deadline:
                return _checked(response)
            time.sleep(0.5)

    def get(self, path: str) -> Object:
        """The object, or for a collection the list."""
        return self.request("GET", path)

    def items(self, path: str, **query: str) -> list[Object]:
        """The objects of a collection."""
        return self.request("GET", path, None, JSON, **query).get("items") or []

    def find(self, path: str) -> Object | None:
        """The object, or None where there is none."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def create(self, obj: Object) -> Object:
        """Create it in its namespace; 409 when there is one."""
        return self.request("POST", path_of(obj).rpartition("/")[0], obj)

    def apply(self, obj: Object) -> Object:
        """Server-side apply, taking every field."""
        return self.request("PATCH", path_of(obj), obj, APPLY, fieldManager=FIELD_MANAGER, force=True)

    def patch(self, path: str, change: Object, kind: str = MERGE) -> Object:
        """Merge patch, or another `kind`."""
        return self.request("PATCH", path, change, kind)

    def delete(self, path: str, uid: str | None = None, grace: int | None = None) -> None:
        """Delete; with `uid` only that very object. Gone already is fine."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            self.request("DELETE", path, options)
        except ApiError as error:
            if error.status != 404 and not (error.status == 409 and uid is not None):
                raise

    def watch(self, path: str, resource_version: str, seconds: int = 300, **query: str) -> Iterator[tuple[str, Object]]:
        """Changes after `resource_version` as (ADDED | MODIFIED | DELETED | ERROR, object), until the server ends it."""
        parameters = {**query, "watch": "true", "resourceVersion": resource_version, "timeoutSeconds": str(seconds)}
        response = self._pool.request(
            "GET",
            self.server + path + _query(parameters),
            headers=self._headers,
            preload_content=False,
            timeout=urllib3.Timeout(connect=5.0, read=seconds + 10.0),
        )
        try:
            if response.status >= 300:
                _checked(response)
            rest = b""
            for chunk in response.stream(1 << 16, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield event["type"], event["object"]
        finally:
            response.close()


def path_of(obj: Object) -> str:
    """The API path of an object that says its apiVersion, kind, name and namespace."""
    version, kind, metadata = obj["apiVersion"], obj["kind"], obj["metadata"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    plural = kind.lower()
    plural += "es" if plural.endswith(("s", "ch")) else "s"
    if plural.endswith("ys"):
        plural = plural[:-2] + "ies"
    namespace = f"/namespaces/{metadata['namespace']}" if metadata.get("namespace") else ""
    return f"{root}{namespace}/{plural}/{metadata['name']}"


def condition(obj: Object, kind: str) -> Object:
    """The condition of this type, or an empty one."""
    conditions: list[Object] = obj.get("status", {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind), {})


def is_true(obj: Object, kind: str) -> bool:
    """Whether the condition of this type is True."""
    return condition(obj, kind).get("status") == "True"


def _query(parameters: dict[str, Any]) -> str:
    text = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in parameters.items()}
    return "?" + urlencode(text) if text else ""


def _checked(response: urllib3.BaseHTTPResponse) -> Object:
    data = response.data
    try:
        content: Object = json.loads(data) if data else {}
    except ValueError:
        content = {"message": data.decode(errors="replace")[:500]}
    if response.status >= 300:
        raise ApiError(response.status, content.get("reason", ""), content.get("message", ""))
    return content
