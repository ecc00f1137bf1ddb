"""A container as a local process: its environment, its volumes, its own hosts file and hostname.

The process lives in mount and UTS namespaces of its own (and, without root, in a user namespace, which gives the right
to make them). Images are ignored: commands run on this machine's file system, with this Python first in PATH.
"""

import base64
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.lab.api import Api, Object
from tests.lab.components import unshare
from tests.lab.lab import MARK, REPOSITORY, SHARED_FOLDER
from trainer.hardware import DeviceType

TOKEN_SECONDS = 24 * 3600
SHARED = "/run/lab"
# /run is emptied first: service-account tokens belong below it. Other volumes need a folder that exists here already,
# since nothing may be made on this machine's own file system.
SETUP = f"""
set -e
mount -t tmpfs tmpfs /run
mkdir {SHARED}
mount --bind "$3" {SHARED}
mount --bind "$1" /etc/hosts
hostname "$2"
shift 3
while [ "$1" != -- ]; do
  case "$2" in /run/*|/var/run/*) mkdir -p "$2";; esac
  mount --rbind "$1" "$2"
  shift 2
done
shift
exec "$@"
"""


class CannotStart(Exception):
    """What a kubelet reports as CreateContainerConfigError."""


@dataclass
class Sandbox:
    """What the containers of a pod share."""

    api: Api
    lab: Path
    pod: Object
    folder: Path  # of this pod: logs, volumes, hosts
    address: str  # of this pod alone, on the loopback device
    device: DeviceType | None
    environment: dict[str, str]  # every pod's

    @property
    def hosts_file(self) -> Path:
        return self.folder / "hosts"

    @property
    def hostname(self) -> str:
        hostname: str = self.pod["spec"].get("hostname") or self.pod["metadata"]["name"]
        return hostname[:63]

    def start(self, container: Object) -> subprocess.Popen[bytes]:
        """Start the container's command. Raises CannotStart with what is wrong."""
        command = [*container.get("command", []), *container.get("args", [])]
        if not container.get("command"):
            raise CannotStart(f"container {container['name']}: the lab has no images, so a command is needed")
        environment = self._environment(container)
        words = [expand(word, environment) for word in command]
        mounts = self._mounts(container)
        shared = self.lab / SHARED_FOLDER
        shared.mkdir(exist_ok=True)
        inside = [str(self.hosts_file), self.hostname, str(shared), *mounts, "--", *words]
        with (self.folder / f"{container['name']}.log").open("ab") as log:
            return subprocess.Popen(
                [*unshare("--mount", "--uts"), "sh", "-c", SETUP, "sh", *inside],
                env=environment,
                cwd=container.get("workingDir") or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _environment(self, container: Object) -> dict[str, str]:
        """As a kubelet builds it, with what GKE adds to pods that ask for TPUs. The container's own words win."""
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(REPOSITORY),
            "HOSTNAME": self.hostname,
            MARK: str(self.lab),
            f"{MARK}_PROCESS": "pod",
            f"{MARK}_POD": self.pod["metadata"]["uid"],
            **self.environment,
        }
        chips = int((container.get("resources", {}).get("limits") or {}).get("google.com/tpu", 0))
        if chips and self.device is not None:
            environment |= tpu_environment(self.pod, self.device, chips)
        for source in container.get("envFrom") or []:
            prefix = source.get("prefix", "")
            for kind, plural in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
                if kind in source:
                    values = self._values(plural, source[kind])
                    environment |= {f"{prefix}{k}": v.decode() for k, v in values.items()}
        for variable in container.get("env") or []:
            value = self._value(variable)
            if value is not None:
                environment[variable["name"]] = expand(value, environment)
        return environment

    def _value(self, variable: Object) -> str | None:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable.get("value", ""))
        if "fieldRef" in source:
            return self.field(source["fieldRef"]["fieldPath"])
        for kind, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
            if kind in source:
                content = self._values(plural, source[kind]).get(source[kind]["key"])
                if content is None and not source[kind].get("optional"):
                    raise CannotStart(f"couldn't find key {source[kind]['key']} in {plural} {source[kind]['name']}")
                return None if content is None else content.decode()
        raise CannotStart(f"env {variable['name']}: the lab knows no {', '.join(source)}")

    def _values(self, plural: str, reference: Object) -> dict[str, bytes]:
        """Content of a ConfigMap or Secret; empty when it is optional and missing."""
        namespace, name = self.pod["metadata"]["namespace"], reference["name"]
        found = self.api.find(f"/api/v1/namespaces/{namespace}/{plural}/{name}")
        if found is None:
            if reference.get("optional"):
                return {}
            raise CannotStart(f"{plural} {name!r} not found")
        data: dict[str, str] = found.get("data") or {}
        if plural == "secrets":
            return {k: base64.b64decode(v) for k, v in data.items()}
        binary = {k: base64.b64decode(v) for k, v in (found.get("binaryData") or {}).items()}
        return {k: v.encode() for k, v in data.items()} | binary

    def field(self, path: str) -> str:
        """A downward API field of the pod. Raises CannotStart for one the lab does not know."""
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        keyed = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
        if keyed:
            return str((metadata.get(keyed[1]) or {}).get(keyed[2], ""))
        fields = {
            "metadata.name": metadata["name"],
            "metadata.namespace": metadata["namespace"],
            "metadata.uid": metadata["uid"],
            "spec.nodeName": spec.get("nodeName", ""),
            "spec.serviceAccountName": spec.get("serviceAccountName", ""),
            "status.podIP": self.address,
            "status.podIPs": self.address,
            "status.hostIP": "127.0.0.1",
        }
        if path not in fields:
            raise CannotStart(f"the lab knows no field {path}")
        return str(fields[path])

    def _mounts(self, container: Object) -> list[str]:
        """source, target, source, target, … of the container's volumes, each made the first time it is needed."""
        volumes = {v["name"]: v for v in self.pod["spec"].get("volumes") or []}
        mounts = container.get("volumeMounts") or []
        words: list[str] = []
        # One that covers this pod's folder (/tmp, in tests) comes last: it hides what the others are made from.
        for mount in sorted(mounts, key=lambda m: self.folder.is_relative_to(m["mountPath"])):
            target = mount["mountPath"]
            if not Path(target).is_dir() and not target.startswith(("/run/", "/var/run/")):
                raise CannotStart(f"mountPath {target}: the lab mounts below /run, or on folders this machine has")
            source = self._volume(volumes[mount["name"]]) / str(mount.get("subPath", ""))
            if REPOSITORY.is_relative_to(target):  # which stands for the image, and is not to be hidden
                place = source / REPOSITORY.relative_to(target)
                place.mkdir(parents=True, exist_ok=True)
                words += [str(REPOSITORY), str(place)]
            words += [str(source), target]
        return words

    def _volume(self, volume: Object) -> Path:
        if "hostPath" in volume:
            return Path(str(volume["hostPath"]["path"]))
        folder = self.folder / "volumes" / str(volume["name"])
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        if "emptyDir" in volume:
            return folder
        sources = volume["projected"]["sources"] if "projected" in volume else [volume]
        for source in sources:
            for path, content in self._files(source).items():
                place = folder / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
        return folder

    def _files(self, source: Object) -> dict[str, bytes]:
        """Files of one volume source: path → content."""
        if "serviceAccountToken" in source:
            return {source["serviceAccountToken"]["path"]: self._token(source["serviceAccountToken"]).encode()}
        if "downwardAPI" in source:
            return {i["path"]: self.field(i["fieldRef"]["fieldPath"]).encode() for i in source["downwardAPI"]["items"]}
        for kind, plural in (("configMap", "configmaps"), ("secret", "secrets")):
            if kind in source:
                reference = {"name": source[kind].get("secretName"), **source[kind]}
                values = self._values(plural, reference)
                items = source[kind].get("items")
                return {i["path"]: values[i["key"]] for i in items} if items else values
        raise CannotStart(f"the lab knows no volume of kind {', '.join(k for k in source if k != 'name')}")

    def _token(self, wanted: Object) -> str:
        """A token of the pod's service account, bound to the pod."""
        metadata = self.pod["metadata"]
        account = self.pod["spec"].get("serviceAccountName") or "default"
        bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        spec = {"expirationSeconds": TOKEN_SECONDS, "boundObjectRef": bound}
        if wanted.get("audience"):
            spec["audiences"] = [wanted["audience"]]
        path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        token: str = self.api.request("POST", path, request)["status"]["token"]
        return token

    def remove_volumes(self) -> None:
        """Tokens and secrets go with the pod; logs stay."""
        shutil.rmtree(self.folder / "volumes", ignore_errors=True)


def expand(text: str, environment: dict[str, str]) -> str:
    """Kubernetes' $(NAME): unknown names stay as they are, $$ is a $."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)", replaced, text)


def tpu_environment(pod: Object, device: DeviceType, chips: int) -> dict[str, str]:
    """What GKE's webhook adds to the pods of a TPU slice, and what makes CPUs stand in for the container's chips."""
    labels = pod["metadata"].get("labels") or {}
    index = int(labels.get("batch.kubernetes.io/job-completion-index", "0"))
    jobset, group = (labels.get(f"jobset.sigs.k8s.io/{key}", "") for key in ("jobset-name", "replicatedjob-name"))
    job, subdomain = labels.get("jobset.sigs.k8s.io/job-index", "0"), pod["spec"].get("subdomain", "")

    def host(slice_: str, number: int) -> str:
        return f"{jobset}-{group}-{slice_}-{number}.{subdomain}"

    devices = device.devices * chips // device.chips
    environment = {
        "TPU_WORKER_ID": str(index),
        "TPU_WORKER_HOSTNAMES": ",".join(host(job, n) for n in range(device.hosts)) if jobset else "localhost",
        "TPU_TOPOLOGY": device.gke_topology or "",
        "TPU_ACCELERATOR_TYPE": device.name,
        "TPU_SKIP_MDS_QUERY": "true",
        "JAX_PLATFORMS": "cpu",
        # Small programs that stand in for large ones: half of a start would be LLVM's optimisations.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    }
    slices = int(labels.get("jobset.sigs.k8s.io/replicatedjob-replicas", "1"))
    if jobset and slices > 1:
        environment["MEGASCALE_NUM_SLICES"] = str(slices)
        environment["MEGASCALE_SLICE_ID"] = job
        environment["MEGASCALE_COORDINATOR_ADDRESS"] = host("0", 0)
    return environment


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal the container's processes; those that are gone don't mind."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass
