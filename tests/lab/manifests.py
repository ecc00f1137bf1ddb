"""What the API server is told before JobSet and Kueue start: CRDs, namespaces, webhooks, and Kueue's visibility API.

The manifests are the modules' own. What a cluster does with kustomize, cert-manager and Services is done here
directly: webhooks are called by URL on 127.0.0.1, with the lab's certificate authority.
"""

import base64
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from tests.lab.api import Api, ApiError, is_true

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ESTABLISHED_SECONDS = 30.0
GROUPS = ("kueue.x-k8s.io", "batch", "jobset.x-k8s.io")  # Kueue's webhooks for what it is configured to manage
KUEUE_API = "visibility.kueue.x-k8s.io"


def install_apis(api: Api, binaries: Path) -> None:
    """CRDs and namespaces; returns when every CRD is established (Kueue exits otherwise)."""
    _retry(lambda: api.get(CRDS))
    files = sorted((binaries / "manifests").glob("*/crd/bases/*.json"), key=lambda f: -f.stat().st_size)
    with ThreadPoolExecutor(4) as pool:  # the largest first, the small ones beside it
        list(pool.map(lambda file: api.request("POST", CRDS, file.read_text()), files))
    names = [".".join(reversed(file.stem.split("_", 1))) for file in files]
    for namespace in ("jobset-system", "kueue-system"):
        api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    deadline = time.monotonic() + ESTABLISHED_SECONDS
    for name in names:
        while not is_true(api.get(f"{CRDS}/{name}"), "Established"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"CRD {name} is not established after {ESTABLISHED_SECONDS:.0f} s")
            time.sleep(0.05)


def install_webhooks(api: Api, binaries: Path, ports: dict[str, int], authority: bytes) -> None:
    """The webhook configurations of JobSet and Kueue."""
    for component in ("jobset", "kueue"):
        file = binaries / "manifests" / component / "webhook" / "manifests.yaml"
        for configuration in yaml.load_all(file.read_text(), Loader=yaml.CSafeLoader):
            configuration["metadata"]["name"] = f"{component}-{configuration['metadata']['name']}"
            hooks = [h for h in configuration["webhooks"] if component == "jobset" or _managed(h)]
            configuration["webhooks"] = [_by_url(h, ports[f"{component}-webhook"], authority) for h in hooks]
            api.apply(configuration)
    _install_conversion(api, binaries, ports["kueue-webhook"], authority)


def _install_conversion(api: Api, binaries: Path, port: int, authority: bytes) -> None:
    """Kueue translates between the versions of its own objects; which, its kustomization says."""
    folder = binaries / "manifests" / "kueue" / "crd"
    for entry in yaml.safe_load((folder / "kustomization.yaml").read_text())["patches"]:
        patch = yaml.safe_load((folder / entry["path"]).read_text())
        webhook = patch["spec"]["conversion"]["webhook"]
        webhook["clientConfig"] = _client(webhook["clientConfig"], port, authority)
        api.patch(f"{CRDS}/{patch['metadata']['name']}", patch)


def install_visibility(api: Api, port: int) -> None:
    """Kueue's API of queue positions, through the aggregator: a Service that is a name for 127.0.0.1 leads there."""
    api.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "visibility-server", "namespace": "kueue-system"},
            "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port, "name": "https"}]},
        }
    )
    for version in ("v1beta1", "v1beta2"):
        api.apply(
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": f"{version}.{KUEUE_API}"},
                "spec": {
                    "group": KUEUE_API,
                    "version": version,
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                    "insecureSkipTLSVerify": True,
                    "service": {"name": "visibility-server", "namespace": "kueue-system", "port": port},
                },
            }
        )


def _managed(hook: dict[str, Any]) -> bool:
    return all(group in GROUPS for rule in hook["rules"] for group in rule["apiGroups"])


def _by_url(hook: dict[str, Any], port: int, authority: bytes) -> dict[str, Any]:
    """The webhook with an address of this machine, and selectors as the project's own installation sets them."""
    hook = {**hook, "clientConfig": _client(hook["clientConfig"], port, authority)}
    if any("pods" in rule["resources"] for rule in hook["rules"]):
        exists = {"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}
        hook["objectSelector"] = {"matchExpressions": [exists]}
    return hook


def _client(configuration: dict[str, Any], port: int, authority: bytes) -> dict[str, str]:
    """A webhook's clientConfig by URL instead of by Service."""
    url = f"https://127.0.0.1:{port}{configuration['service']['path']}"
    return {"url": url, "caBundle": base64.b64encode(authority).decode()}


def _retry(call: Any, seconds: float = 10.0) -> None:
    """Until the API server knows its own kinds, it answers 403 or 404."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            call()
            return
        except ApiError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
