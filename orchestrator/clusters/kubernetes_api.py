"""Calls of the Kubernetes API: JSON in, JSON out, with the deadlines and the renewals that a process of weeks needs.

On the official client's ApiClient, for its configuration, credentials and TLS, but not on its models: a Pod as a model
takes several times the memory of what we look at. Every call has a deadline of its own (the client's default is none:
a cut connection hangs for ever), nothing is repeated behind our back, and the client is made anew from its
configuration every ten minutes and after a 401, because tokens are rotated and kubeconfigs rewritten.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes import config as kubernetes_config
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException

from orchestrator.clusters.base import ClusterUnavailable
from trainer.errors import ConfigurationError

Object = dict[str, Any]

CONNECT_SECONDS, READ_SECONDS = 3.0, 20.0
RENEW_SECONDS = 600.0
# A watch that says nothing for this much longer than the server was asked to keep it open is half-open.
WATCH_SLACK_SECONDS = 7.0
CONNECTIONS = 32
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class ApiError(Exception):
    """The API server has understood and refused: an answer of 4xx that asking again does not change."""

    def __init__(self, status: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(f"{message or reason} (HTTP {status})")
        self.status = status
        self.reason = reason  # Kubernetes' word for it: NotFound, AlreadyExists, Conflict, Forbidden, Invalid, …
        self.message = message
        self.details = details or {}


class Gone(Exception):
    """The watch cannot go on from where it was asked to: list again."""


class KubernetesApi:
    """One API server and one identity. Safe to share between threads.

    `configure` gives a fresh configuration each time (see `configuration_from`). Every call raises ClusterUnavailable
    when the outcome is unknown (no answer, 401, 408, 429, 5xx), and ApiError when the answer is a refusal.
    """

    def __init__(self, configure: Callable[[], Configuration]) -> None:
        self._configure = configure
        self._lock = threading.Lock()
        self._client: ApiClient | None = None
        self._made = 0.0
        self._cluster_uid: str | None = None

    @property
    def cluster_uid(self) -> str:
        """The cluster's identity: the uid of its namespace kube-system. Read once."""
        if self._cluster_uid is None:
            try:
                found = self.request("GET", "/api/v1/namespaces/kube-system")
            except ApiError as error:
                raise ClusterUnavailable(
                    "the cluster's identity cannot be read; not allowed: needed is the verb get on namespaces, name "
                    f"kube-system: {error}"
                ) from error
            self._cluster_uid = str(found["metadata"]["uid"])
        return self._cluster_uid

    def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = JSON,
        read_seconds: float = READ_SECONDS,
    ) -> Object:
        """One call, and its answer as an object."""
        status, data = self._call(method, path, body, query or {}, content_type, read_seconds)
        if status == 401:
            self._renew()  # the token was rotated, or the kubeconfig rewritten
            status, data = self._call(method, path, body, query or {}, content_type, read_seconds)
        return _checked(status, data)

    def watch(self, path: str, query: dict[str, str], seconds: int) -> Iterator[Object]:
        """The events of a watch, until the server ends it in order after `seconds`.

        Raises Gone for 410, ClusterUnavailable when it is cut, is silent for too long, or the server reports an error.
        """
        parameters = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        response = self._send("GET", path, None, parameters, JSON, seconds + WATCH_SLACK_SECONDS)
        try:
            if response.status == 410:
                raise Gone(path)
            if response.status >= 300:
                if response.status == 401:
                    self._renew()
                _checked(response.status, response.data)
            yield from _events(response, path)
        except urllib3.exceptions.HTTPError as error:
            raise ClusterUnavailable(f"watch of {path}: {_brief(error)}") from error
        finally:
            response.close()

    def _call(
        self, method: str, path: str, body: Object | None, query: dict[str, str], content_type: str, read_seconds: float
    ) -> tuple[int, bytes]:
        response = self._send(method, path, body, query, content_type, read_seconds)
        try:
            return response.status, response.data
        except urllib3.exceptions.HTTPError as error:
            raise ClusterUnavailable(f"{method} {path}: {_brief(error)}") from error
        finally:
            response.release_conn()

    def _send(
        self, method: str, path: str, body: Object | None, query: dict[str, str], content_type: str, read_seconds: float
    ) -> Any:
        """The urllib3 response, its body not read yet."""
        client = self._current()
        headers = {"Accept": JSON, "Content-Type": content_type}
        target = f"{path}?{urlencode(query)}" if query else path
        parts = client.param_serialize(method, target, header_params=headers, auth_settings=["BearerToken"])
        try:
            answer = client.call_api(
                *parts[:3], body=body, _request_timeout=(CONNECT_SECONDS, read_seconds)
            )  # parts: method, url, headers, and no body of ours
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as error:
            raise ClusterUnavailable(f"{method} {path}: {_brief(error)}") from error
        return answer.response

    def _current(self) -> ApiClient:
        with self._lock:
            if self._client is None or time.monotonic() - self._made > RENEW_SECONDS:
                try:
                    configuration = self._configure()
                except (ConfigException, OSError, ValueError) as error:
                    if self._client is not None:  # being rewritten at this moment, say
                        return self._client
                    raise ClusterUnavailable(f"no configuration for the cluster: {error}") from error
                configuration.retries = False
                configuration.connection_pool_maxsize = CONNECTIONS
                client = ApiClient(configuration)
                client.user_agent = "untildone"
                self._client, self._made = client, time.monotonic()
            return self._client

    def _renew(self) -> None:
        """The next call makes a new client. Watches that are open keep theirs."""
        with self._lock:
            self._made = float("-inf")


def configuration_from(kubeconfig: str | Path | None = None, context: str | None = None) -> Callable[[], Configuration]:
    """How to get the configuration: in a pod its service account, else the kubeconfig (default: as kubectl has it).

    Raises ConfigurationError when there is none.
    """
    if kubeconfig is None and context is None and NAMESPACE_FILE.exists():

        def configure() -> Configuration:
            configuration = Configuration()
            kubernetes_config.load_incluster_config(client_configuration=configuration)
            return configuration

    else:

        def configure() -> Configuration:
            configuration = Configuration()
            kubernetes_config.load_kube_config(
                config_file=str(kubeconfig) if kubeconfig else None,
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
            return configuration

    try:
        configure()
    except (ConfigException, OSError) as error:
        raise ConfigurationError(
            f"no cluster to talk to: {error}; set KUBECONFIG, or give --kubeconfig and --context"
        ) from error
    return configure


def current_namespace(kubeconfig: str | Path | None = None, context: str | None = None) -> str:
    """The namespace that kubectl would use: of the pod, else of the kubeconfig's context, else default."""
    if kubeconfig is None and context is None and NAMESPACE_FILE.exists():
        return NAMESPACE_FILE.read_text().strip()
    contexts, active = kubernetes_config.list_kube_config_contexts(str(kubeconfig) if kubeconfig else None)
    chosen = next((c for c in contexts if c["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")


def _events(response: Any, path: str) -> Iterator[Object]:
    """The events of a watch's body: one JSON object a line."""
    rest = b""
    for chunk in response.stream(1 << 16, decode_content=True):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield _event(line, path)
    if rest.strip():
        raise ClusterUnavailable(f"watch of {path}: cut within an event")


def _event(line: bytes, path: str) -> Object:
    try:
        event: Object = json.loads(line)
        kind, content = event["type"], event["object"]
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterUnavailable(f"watch of {path}: not an event: {line[:80]!r}") from error
    if kind == "ERROR":
        if content.get("code") == 410:
            raise Gone(path)
        raise ClusterUnavailable(f"watch of {path}: {content.get('message') or content.get('reason') or content}")
    return event


def _checked(status: int, data: bytes) -> Object:
    try:
        content: Object = json.loads(data) if data else {}
        if not isinstance(content, dict):
            raise ValueError
    except ValueError:
        if status < 300:
            raise ClusterUnavailable(f"an answer that is not JSON: {data[:80]!r}") from None
        content = {"message": data.decode(errors="replace")[:300]}
    if status < 300:
        return content
    message = str(content.get("message") or "")
    if status in (401, 408, 429) or status >= 500:
        raise ClusterUnavailable(f"the API server answered {status}: {message or content.get('reason', '')}")
    raise ApiError(status, str(content.get("reason") or ""), message, content.get("details"))


def _brief(error: BaseException) -> str:
    """A connection error without the addresses of Python objects in it."""
    inner = getattr(error, "reason", None) or error
    text = str(inner).partition(": ")[2] if "object at 0x" in str(inner) else str(inner)
    return text or type(error).__name__
