"""The chart, the images' recipes and the pinned requirements: what can be checked without Helm, cluster or containers."""

import json
import re
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from orchestrator.cli import COMMANDS
from orchestrator.operating.rights import LEASE, RIGHTS, Scope
from tests.lab import build_helm
from tools.render_manifests import CHART, CRD, CRD_IN_CHART
from trainer.cli import SUBCOMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
IMAGES = {"operator.txt": ("gcs",), "trainer.txt": ("gcs", "trainer")}


def values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return loaded


def keys(node: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted names of what a schema names."""
    found: set[str] = set()
    for name, inner in node.get("properties", {}).items():
        found |= {prefix + name} | keys(inner, f"{prefix}{name}.")
    return found


def leaves(node: Any, known: set[str], prefix: str = "") -> set[str]:
    """Dotted names of what the values name, no deeper than `known` goes."""
    found: set[str] = set()
    for name, inner in node.items():
        found.add(prefix + name)
        if isinstance(inner, dict) and any(key.startswith(f"{prefix}{name}.") for key in known):
            found |= leaves(inner, known, f"{prefix}{name}.")
    return found


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    known = keys(schema())
    assert leaves(values(), known) == known - {"global"}


def test_every_part_of_the_schema_says_what_it_is_and_refuses_what_it_does_not_know() -> None:
    def look(node: dict[str, Any], where: str) -> None:
        for name, inner in node["properties"].items():
            if where != ".resources":
                assert inner.get("description"), f"{where}.{name} has no description"
            if "properties" in inner and name not in ("env",):
                assert inner["additionalProperties"] is False, f"{where}.{name} accepts any key"
                look(inner, f"{where}.{name}")

    assert schema()["additionalProperties"] is False
    look(schema(), "")


def test_values_that_the_documents_set_exist() -> None:
    known = keys(schema())
    texts = {p.name: p.read_text() for p in sorted((ROOT / "docs").glob("*.md"))}
    texts["NOTES.txt"] = (CHART / "templates" / "NOTES.txt").read_text()
    named = {
        (file, name)
        for file, text in texts.items()
        for part in text.split("\n\n")
        if "trainer" not in part or "helm" in part  # the trainer has options of this name too
        for name in re.findall(r"--set[ =]'?([\w.]+?)=", part)
    }
    assert len(named) >= 5
    free = ("runDirectories.", "FIELD")  # any namespace; a placeholder
    unknown = {(file, name) for file, name in named if name not in known and not name.startswith(free)}
    assert not unknown


def test_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_the_chart_has_the_committed_definition() -> None:
    assert CRD_IN_CHART.read_bytes() == CRD.read_bytes(), "run: make manifests"


def test_helm_is_built_from_its_module_file() -> None:
    text = (build_helm.MODULES / "go.mod").read_text()
    assert f"tool {build_helm.PACKAGE}\n" in text
    assert re.search(rf"^\s*helm\.sh/helm/v4 {re.escape(build_helm.VERSION)}\b", text, re.MULTILINE)


def rules(block: str) -> set[tuple[str, str, str, str | None]]:
    """(group, resource, verb, name) of one list of rules in the chart."""
    text = (CHART / "templates" / "_rules.tpl").read_text()
    found = re.search(rf'define "untildone.{block}" -}}}}\n(.*?){{{{- end }}}}', text, re.DOTALL)
    assert found is not None
    listed = yaml.safe_load(re.sub(r"\{\{.*?\}\}", f'"{LEASE}"', found[1]))
    triples = {
        (group, resource, verb, name)
        for rule in listed
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [None])
    }
    assert triples
    return triples


@pytest.mark.parametrize(
    ("block", "scope", "optional"),
    [
        ("namespacedRules", Scope.RUNS, {False, True}),
        ("clusterRules", Scope.CLUSTER, {False}),
        ("clusterReads", Scope.CLUSTER, {True}),
        ("ownRules", Scope.OWN, {False}),
    ],
)
def test_the_roles_are_the_rights_that_the_code_names(block: str, scope: Scope, optional: set[bool]) -> None:
    wanted = {
        (right.group, right.resource, verb, right.name)
        for right in RIGHTS
        if right.scope is scope and right.optional in optional
        for verb in right.verbs
    }
    assert rules(block) == wanted


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
class TestDockerfile:
    """Not built here: no container engine. What it copies and starts is there."""

    def test_copies_what_exists_and_is_not_ignored(self, file: Path) -> None:
        kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
        copied = re.findall(r"^COPY (?!--from)(.+) \S+$", file.read_text(), re.MULTILINE)
        sources = [source for line in copied for source in line.split()]
        assert len(sources) >= 6
        for source in sources:
            assert (ROOT / source).exists(), source
            assert {source, re.sub(r"[^/]+\.txt$", "*.txt", source)} & kept, f"{source} is ignored"

    def test_starts_a_command_that_exists(self, file: Path) -> None:
        words = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", file.read_text(), re.MULTILINE)
        command = [word for part in words for word in json.loads(part)]
        if command[0] == "untildone":
            assert command[1] in COMMANDS
        else:
            assert command[:3] == ["python", "-m", "trainer"] and command[3] in SUBCOMMANDS
        assert command[-1] == "--help"  # without arguments it says what it needs

    def test_is_not_root_and_fetches_nothing_itself(self, file: Path) -> None:
        text = file.read_text()
        assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", text, re.MULTILINE)
        assert not re.search(r"https?://|index-url|\bcurl\b|\bwget\b|^ADD ", text, re.MULTILINE)


def pins(file: str) -> dict[str, set[str]]:
    """name → versions (more than one where they depend on the Python)."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "requirements" / file).read_text().splitlines():
        if match := re.match(r"([\w.\-]+)(?:\[[\w,-]+\])?==([^\s;]+)", line):
            found.setdefault(canonicalize_name(match[1]), set()).add(match[2])
    return found


@pytest.mark.parametrize("file", ["dev.txt", "build.txt", *IMAGES])
def test_requirements_name_no_index(file: str) -> None:
    text = (ROOT / "requirements" / file).read_text()
    assert not re.search(r"^\s*(--|-i|-f)\b|://", text, re.MULTILINE)
    assert len(pins(file)) >= 4


@pytest.mark.parametrize("file", ["build.txt", *IMAGES])
def test_images_get_the_versions_that_were_tested(file: str) -> None:
    tested, image = pins("dev.txt"), pins(file)
    only_here = set(image) - set(tested)
    assert only_here <= {"libtpu", "requests", "charset-normalizer", "idna", "urllib3", "certifi"}, only_here
    assert {name: image[name] for name in image if name in tested} == {n: tested[n] for n in image if n in tested}


@pytest.mark.parametrize(("file", "extras"), IMAGES.items())
def test_requirements_of_images_are_complete(file: str, extras: tuple[str, ...]) -> None:
    """Whatever an installed package asks for on Linux is pinned, from the project's own list down."""
    pinned = pins(file)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]
    queue = [(Requirement(text), ("",)) for text in waiting]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement, wanted = queue.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in wanted):
            continue
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"requirements/{file} lacks {name}: run make lock"
        assert any(requirement.specifier.contains(version, prereleases=True) for version in pinned[name]), requirement
        if (name, frozenset(requirement.extras)) in seen or name == "libtpu":
            continue
        seen.add((name, frozenset(requirement.extras)))
        queue += [(Requirement(text), ("", *requirement.extras)) for text in requires(name) or []]
    assert len(seen) >= 20


def test_the_trainer_image_has_the_program_of_tpus() -> None:
    assert "libtpu" in pins("trainer.txt") and "jax" not in pins("operator.txt")
