"""The plain manifests, rendered from the chart: python -m tools.render_manifests (or: make manifests).

One source: the chart has a copy of the CustomResourceDefinition, and manifests/*.yaml are what the chart says, less
what belongs to Helm. Uses the Helm that the tests build where it is built, else the one in PATH.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.lab import build_helm

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "untildone"
CRD = ROOT / "manifests" / "crd" / "untildone.dev_trainingruns.yaml"
CRD_IN_CHART = CHART / "files" / "trainingruns.yaml"
NAMESPACE = "untildone"
# Not a name that any registry has: a pod says InvalidImageName until it is replaced.
IMAGE = "REGISTRY/untildone/operator"
# file -> what is set, and what the file is for
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "install.yaml": ({}, "untildone for all namespaces"),
    "install-namespaced.yaml": (
        {"rbac": {"clusterWide": False}, "watchNamespaces": ["default"]},
        "untildone for the namespace default alone; for others change watchNamespaces and the Role and RoleBinding of default",
    ),
}
HEADER = """\
# {what}. Rendered from helm/untildone by `make manifests`: change the chart, not this file.
# Before applying: replace REGISTRY, and fill runDirectories in the ConfigMap.
"""


class NoHelm(RuntimeError):
    """There is no Helm to render with; the message says how to get one."""


def helm() -> str:
    """Path of a Helm. Raises NoHelm."""
    built = build_helm.cache_folder() / "helm"
    found = str(built) if built.exists() else shutil.which("helm")
    if found is None:
        raise NoHelm("no helm on this machine: install Helm 4, or build it with python -m tests.lab.build_helm")
    return found


def render(helm: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The chart's objects with `values`, installed as release `untildone` in namespace `untildone`."""
    command = [helm, "template", "untildone", str(CHART), "--namespace", NAMESPACE, "--values", "-"]
    done = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]


def plain(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is Helm's: its labels, its annotations, and the pods that only its commands start."""
    kept = [o for o in objects if "helm.sh/hook" not in o["metadata"].get("annotations", {})]
    for item in kept:
        template = item["spec"]["template"]["metadata"] if item["kind"] == "Deployment" else {}
        for metadata in (item["metadata"], template):
            for part in ("labels", "annotations"):
                words = metadata.get(part, {})
                for key in [k for k in words if k.startswith("helm.sh/") or k == "app.kubernetes.io/managed-by"]:
                    del words[key]
                if part in metadata and not words:
                    del metadata[part]
    return kept


def manifest(helm: str, file: str) -> str:
    """The content of manifests/`file`."""
    values, what = VARIANTS[file]
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }
    objects = [namespace, *plain(render(helm, {"image": {"repository": IMAGE}, **values}))]
    texts = [yaml.dump(o, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True) for o in objects]
    return HEADER.format(what=what) + "---\n" + "---\n".join(texts)


class _Plain(yaml.SafeDumper):
    """No anchors, and text of several lines as it is written."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Plain.add_representer(str, _text)


def main() -> None:
    CRD_IN_CHART.parent.mkdir(exist_ok=True)
    CRD_IN_CHART.write_bytes(CRD.read_bytes())
    program = helm()
    for file in VARIANTS:
        (ROOT / "manifests" / file).write_text(manifest(program, file))


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
