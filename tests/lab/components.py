"""What each program of the control plane is started with: flags, configuration files, the address that says it is up.

All of them listen on 127.0.0.1 only. The times of the node controller are far shorter than a cluster's defaults, so
that a test of a lost host takes seconds.
"""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

PORTS = (
    "etcd",
    "etcd-peer",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "jobset-webhook",
    "jobset-health",
    "kueue-webhook",
    "kueue-health",
    "kueue-visibility",
    "gcs",
    "nodes",
    "kubelet",
)
NOT_READY_AFTER_SECONDS = 8  # no heartbeat for so long: the node is NotReady
EVICT_AFTER_SECONDS = 10  # and this much later its pods are deleted
PODS_READY_SECONDS = 60  # Kueue's waitForPodsReady
SERVICE_RANGE = "10.96.0.0/16"


@dataclass(frozen=True)
class Process:
    """A program to start. `ready` is an http(s) address that answers 200 (with any body) once it is up."""

    name: str
    command: list[str]
    ready: str
    environment: dict[str, str] = field(default_factory=dict)


def processes(binaries: Path, folder: Path, ports: dict[str, int]) -> dict[str, Process]:
    """Every program of a lab, in start order. Writes their configuration files below `folder`."""
    return {
        p.name: p
        for p in (
            _etcd(binaries, folder, ports),
            _apiserver(binaries, folder, ports),
            _controller_manager(binaries, folder, ports),
            _scheduler(binaries, folder, ports),
            _gcs(binaries, folder, ports),
            _jobset(binaries, folder, ports),
            _kueue(binaries, folder, ports),
        )
    }


def _etcd(binaries: Path, folder: Path, ports: dict[str, int]) -> Process:
    client, peer = (f"http://127.0.0.1:{ports[name]}" for name in ("etcd", "etcd-peer"))
    command = [str(binaries / "etcd"), "--name=lab", f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=lab={peer}"]
    return Process("etcd", [*command, "--log-level=warn"], f"{client}/health")


def _apiserver(binaries: Path, folder: Path, ports: dict[str, int]) -> Process:
    pki, port = folder / "pki", ports["kube-apiserver"]
    command = [
        str(binaries / "kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{ports['etcd']}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        *_certificate(folder),
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC,Node",
        # Some clusters ask that whoever names a blocking owner may change the owner's finalizers.
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
        f"--audit-policy-file={_audit_policy(folder)}",
        f"--audit-log-path={folder / 'logs' / 'audit.log'}",
        "--endpoint-reconciler-type=none",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki / 'service-account.pub'}",
        f"--service-account-signing-key-file={pki / 'service-account.key'}",
        f"--default-not-ready-toleration-seconds={EVICT_AFTER_SECONDS}",
        f"--default-unreachable-toleration-seconds={EVICT_AFTER_SECONDS}",
        # The aggregator calls Kueue's visibility server with this certificate.
        f"--proxy-client-cert-file={pki / 'tls.crt'}",
        f"--proxy-client-key-file={pki / 'tls.key'}",
        f"--requestheader-client-ca-file={pki / 'ca.crt'}",
        "--requestheader-allowed-names=untildone-lab-server",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
    ]
    return Process("kube-apiserver", command, f"https://127.0.0.1:{port}/readyz")


def _audit_policy(folder: Path) -> Path:
    """Each call of a service account is a line of logs/audit.log: what a pod asked for, and whether it was allowed."""
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}],
    }
    path = folder / "audit.json"
    path.write_text(json.dumps(policy, indent=1))
    return path


def _controller_manager(binaries: Path, folder: Path, ports: dict[str, int]) -> Process:
    port = ports["kube-controller-manager"]
    # Pods have loopback addresses, which endpoints refuse; the lab's nodes write their names into hosts files.
    off = ["endpoints-controller", "endpointslice-controller", "endpointslice-mirroring-controller"]
    command = [
        str(binaries / "kube-controller-manager"),
        f"--kubeconfig={folder / 'kubeconfig'}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        *_certificate(folder),
        f"--root-ca-file={folder / 'pki' / 'ca.crt'}",
        f"--service-account-private-key-file={folder / 'pki' / 'service-account.key'}",
        f"--controllers=*,{','.join(f'-{name}' for name in off)}",
        "--node-monitor-period=1s",
        f"--node-monitor-grace-period={NOT_READY_AFTER_SECONDS}s",
        "--node-startup-grace-period=30s",
        "--node-eviction-rate=100",
        "--secondary-node-eviction-rate=100",
        "--unhealthy-zone-threshold=1",
    ]
    return Process("kube-controller-manager", command, f"https://127.0.0.1:{port}/healthz")


def _scheduler(binaries: Path, folder: Path, ports: dict[str, int]) -> Process:
    port = ports["kube-scheduler"]
    command = [str(binaries / "kube-scheduler"), f"--kubeconfig={folder / 'kubeconfig'}", "--leader-elect=false"]
    command += ["--bind-address=127.0.0.1", f"--secure-port={port}", *_certificate(folder)]
    return Process("kube-scheduler", command, f"https://127.0.0.1:{port}/healthz")


def _gcs(binaries: Path, folder: Path, ports: dict[str, int]) -> Process:
    address = f"127.0.0.1:{ports['gcs']}"
    command = [str(binaries / "fake-gcs-server"), "-scheme", "http", "-host", "127.0.0.1", "-port", str(ports["gcs"])]
    command += ["-backend", "memory", "-public-host", address, "-external-url", f"http://{address}"]
    return Process("gcs", [*command, "-log-level", "warn"], f"http://{address}/storage/v1/b?project=lab")


def _jobset(binaries: Path, folder: Path, ports: dict[str, int]) -> Process:
    health = f"127.0.0.1:{ports['jobset-health']}"
    configuration = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": "127.0.0.1", "port": ports["jobset-webhook"], "certDir": str(folder / "pki")},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": health},
        "clientConnection": {"qps": 500, "burst": 500},
    }
    (folder / "jobset.json").write_text(json.dumps(configuration, indent=1))
    command = [str(binaries / "jobset"), f"--config={folder / 'jobset.json'}", "--zap-log-level=info"]
    return Process("jobset", command, f"http://{health}/readyz", {"KUBECONFIG": str(folder / "kubeconfig")})


def _kueue(binaries: Path, folder: Path, ports: dict[str, int]) -> Process:
    """Kueue reads its certificates from fixed places in / and /etc, so it gets a root folder of its own."""
    root = folder / "kueue-root"
    for place in ("etc/kueue/metrics/certs", "visibility", "webhook"):
        (root / place).mkdir(parents=True, exist_ok=True)
        for name in ("tls.crt", "tls.key"):
            shutil.copy(folder / "pki" / name, root / place / name)
    (root / "tmp").mkdir(exist_ok=True)
    shutil.copy(folder / "pki" / "ca.crt", root / "ca.crt")
    kubeconfig = (folder / "kubeconfig").read_text().replace(str(folder / "pki" / "ca.crt"), "/ca.crt")
    (root / "kubeconfig").write_text(kubeconfig)
    health = f"127.0.0.1:{ports['kueue-health']}"
    configuration = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": "127.0.0.1", "port": ports["kueue-webhook"], "certDir": "/webhook"},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": health},
        "clientConnection": {"qps": 300, "burst": 500},
        "visibilityServer": {"bindAddress": "127.0.0.1", "bindPort": ports["kueue-visibility"]},
        "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
        "waitForPodsReady": {
            "timeout": f"{PODS_READY_SECONDS}s",
            "recoveryTimeout": f"{PODS_READY_SECONDS}s",
            "blockAdmission": False,
            "requeuingStrategy": {"backoffBaseSeconds": 2, "backoffMaxSeconds": 10},
        },
    }
    (root / "config.json").write_text(json.dumps(configuration, indent=1))
    program = root / "kueue"
    if not program.exists():
        try:
            os.link(binaries / "kueue", program)
        except OSError:  # another file system
            shutil.copy(binaries / "kueue", program)
    command = [*unshare(), f"--root={root}", "--wd=/", "/kueue", "--config=/config.json"]
    command += ["--kubeconfig=/kubeconfig", "--zap-log-level=info"]
    return Process("kueue", command, f"http://{health}/readyz", {"KUBECONFIG": "/kubeconfig"})


def _certificate(folder: Path) -> list[str]:
    return [f"--tls-cert-file={folder / 'pki' / 'tls.crt'}", f"--tls-private-key-file={folder / 'pki' / 'tls.key'}"]


def unshare(*namespaces: str) -> list[str]:
    """`unshare` with these namespaces; without root inside a user namespace, which makes the rest possible."""
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *namespaces]
