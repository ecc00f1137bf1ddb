"""What the runs of a namespace may name: folder by folder, with no way around it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.operating.configuration import Configuration, load_configuration
from orchestrator.operating.tenancy import below, escapes, refusals
from tests.support.world import run_of, tiny_recipe
from trainer.errors import ConfigurationError

ALLOWED = {"team-a": ["gs://bucket/a", "gs://data/shared/", "/mnt/a"], "team-b": ["gs://bucket/ab"]}


def run(**spec: Any) -> Any:
    return run_of(**{"runDirectory": "gs://bucket/a/run", "data": {"root": "gs://data/shared/corpus"}, **spec})


def test_a_run_within_its_prefixes_is_allowed() -> None:
    whole = run(
        initFrom={"run": "gs://bucket/a/parent@200"},
        compileCache="gs://bucket/a/cache",
    )
    assert refusals(whole, "team-a", ALLOWED) == ()
    assert refusals(run(runDirectory="/mnt/a/run"), "team-a", ALLOWED) == ()
    assert refusals(run(runDirectory="gs://bucket/a"), "team-a", ALLOWED) == ()
    assert refusals(run(compileCache="/var/cache/compile"), "team-a", ALLOWED) == ()  # in the pod's own file system


PLACES = [
    "gs://bucket/ab",
    "gs://bucket/ab/run",
    "gs://bucket",
    "gs://bucket/",
    "gs://bucke/a/run",
    "gs://bucket/b/run",
    "gs://bucket/a/../ab/run",
    "gs://bucket/a/..",
    "gs://bucket/a/./run",
    "gs://bucket//a/run",
    "gs://bucket/a//../../ab",
    "gs:///bucket/a/run",
    "gs:/bucket/a/run",
    "GS://bucket/a/run",
    "gs://bucket/A/run",
    "gs://bucket/a\n/run",
    "s3://bucket/a/run",
    "file:///mnt/b/run",
    "/mnt/ab/run",
    "/mnt/a/../b",
    "mnt/a/run",
    "../a",
    "//mnt/a/run",
    "/",
]


FIELDS = ["runDirectory", "data.root", "initFrom.run", "initFrom.checkpoint", "initFrom.hf", "compileCache"]


# A compile cache without a scheme is a folder of the pod.
@pytest.mark.parametrize(
    ("field", "place"), [(f, p) for f in FIELDS for p in PLACES if f != "compileCache" or "://" in p]
)
def test_everything_else_is_refused_with_field_and_fix(field: str, place: str) -> None:
    head, _, tail = field.partition(".")
    found = refusals(run(**{head: {tail: place} if tail else place}), "team-a", ALLOWED)
    assert len(found) == 1, found
    assert found[0].startswith(f"spec.{field} ")
    assert "runDirectories" in found[0] or "write it as" in found[0]


def test_a_step_in_initFrom_is_no_way_out() -> None:
    assert refusals(run(initFrom={"run": "gs://bucket/ab/x@7"}), "team-a", ALLOWED)
    assert refusals(run(initFrom={"run": "gs://bucket/a/x@7/../../ab"}), "team-a", ALLOWED)


def test_other_namespaces_have_other_places() -> None:
    assert len(refusals(run(), "team-b", ALLOWED)) == 2
    assert refusals(run(runDirectory="gs://bucket/ab/x", data={"root": "gs://bucket/ab/d"}), "team-b", ALLOWED) == ()
    (first, *_) = refusals(run(), "team-c", ALLOWED)
    assert "runs in namespace team-c may use nothing yet" in first and "runDirectories.team-c" in first
    assert refusals(run(), "team-c", {**ALLOWED, "*": ["gs://bucket", "gs://data"]}) == ()
    assert refusals(run(), "team-b", {**ALLOWED, "*": ["gs://bucket", "gs://data"]}), "listed: its own list counts"


@pytest.mark.parametrize("name", ["./mine.py", "/tmp/mine.py", "../recipes/tiny", "tiny.yaml", "a/b", "tiny\n"])
def test_recipes_are_built_in_ones_only(name: str) -> None:
    (found,) = refusals(run(recipe={"name": name}), "team-a", ALLOWED)
    assert "spec.recipe.name" in found and "configMap" in found


@pytest.mark.parametrize("path", ["../b.bin", "/etc/passwd", "a/../../b.bin", "./a.bin", "a//b.bin", ""])
def test_data_files_stay_below_the_root(path: str) -> None:
    recipe = tiny_recipe()
    file = recipe.data.files[0].model_copy(update={"path": path})
    bad = recipe.model_copy(update={"data": recipe.data.model_copy(update={"files": (file,)})})
    assert len(escapes(bad)) == 1
    held = recipe.model_copy(update={"data": recipe.data.model_copy(update={"held_out": (file,)})})
    assert len(escapes(held)) == 1
    assert escapes(recipe) == ()


folders = st.lists(st.sampled_from(["a", "ab", "b", "..", ".", ""]), max_size=5)


@given(prefix=folders, place=folders)
def test_below_means_that_the_folders_begin_the_same(prefix: list[str], place: list[str]) -> None:
    clean = [part for part in (*prefix, *place) if part in ("", ".", "..")] == []
    expected = clean and bool(prefix) and place[: len(prefix)] == prefix
    assert below("gs://" + "/".join(place), "gs://" + "/".join(prefix)) == expected or not clean
    if not clean and any(part in (".", "..") for part in place):
        assert not below("gs://" + "/".join(place), "gs://" + "/".join(prefix))


def test_the_configuration_is_checked(tmp_path: Any) -> None:
    file = tmp_path / "operator.yaml"
    file.write_text("runDirectories: {team-a: ['gs://bucket/a/']}\nworkers: 3\nlease: {enabled: false}\n")
    found = load_configuration(file)
    assert found.workers == 3 and not found.lease.enabled and found.health.port is None
    file.write_text("")
    assert load_configuration(file) == Configuration()
    for text, message in (
        ("workrs: 3", "did you mean 'workers'"),
        ("runDirectories: {team-a: ['gs://bucket/../b']}", "runDirectories.team-a"),
        ("runDirectories: {team-a: ['bucket/b']}", "runDirectories.team-a"),
        ("workers: 0", "workers"),
        ("workers: yes", "workers"),
        ("{", "not YAML"),
        ("- 1", "operator.yaml"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=message):
            load_configuration(file)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_configuration(tmp_path / "missing.yaml")
