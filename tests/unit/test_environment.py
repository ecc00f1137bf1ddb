"""What a process of a gang is told: its rank as a number or as its place, and what JAX reads."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.environment import PLACE, gang_environment, prepare_jax
from trainer.errors import ConfigurationError
from trainer.plan import Plan

GIVEN: dict[str, str | None] = {
    "run_directory": "/r",
    "attempt": "3",
    "nonce": "n",
    "pod_uid": "u",
    "restart_attempt": "0",
    "process_count": "8",
    "coordinator": "h:1",
}
VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_CPU_COLLECTIVES_IMPLEMENTATION", "JAX_COMPILATION_CACHE_DIR",
             "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
             "TF_CPP_MIN_LOG_LEVEL", "GRPC_VERBOSITY")  # fmt: skip


def place(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    """The second process of the first host of the second slice of two, two hosts each, two processes each: rank 5."""
    values = {"SLICE": "1", "HOST": "0", "HOST_PROCESS": "1", "HOSTS": "2", "HOST_PROCESSES": "2"} | changes
    for name, value in values.items():
        if value is None:
            monkeypatch.delenv(f"UNTILDONE_{name}", raising=False)
        else:
            monkeypatch.setenv(f"UNTILDONE_{name}", value)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("UNTILDONE_")]:
        monkeypatch.delenv(name)


def test_gang_environment_names_what_is_missing() -> None:
    given_all = {**GIVEN, "process_id": "1"}
    assert gang_environment(given_all).attempt == 3
    for name, wrong, said in (
        ("nonce", None, "UNTILDONE_NONCE is not set"),
        ("attempt", "x", "UNTILDONE_ATTEMPT must be a whole number"),
        ("process_id", "8", "not below"),
        ("process_id", None, "UNTILDONE_PROCESS_ID is not set.*UNTILDONE_SLICE"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            gang_environment({**given_all, name: wrong})


def test_the_rank_follows_from_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch)
    assert gang_environment(GIVEN).process_id == 5
    assert gang_environment({**GIVEN, "process_id": "2"}).process_id == 2  # a number that is given counts


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
def test_every_place_has_its_own_rank(slices: int, hosts: int, processes: int) -> None:
    ranks = []
    with pytest.MonkeyPatch.context() as patch:
        for where in [(s, h, p) for s in range(slices) for h in range(hosts) for p in range(processes)]:
            for name, value in zip(PLACE, (*where, hosts, processes), strict=True):
                patch.setenv(f"UNTILDONE_{name}", str(value))
            ranks.append(gang_environment({**GIVEN, "process_count": str(slices * hosts * processes)}).process_id)
    # In order: processes of a host are neighbours, hosts of a slice too.
    assert ranks == list(range(slices * hosts * processes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"HOST": None}, "UNTILDONE_HOST is not set: without UNTILDONE_PROCESS_ID"),
        ({"SLICE": ""}, "UNTILDONE_SLICE is not set"),
        ({"HOST_PROCESS": "b"}, "UNTILDONE_HOST_PROCESS must be a whole number"),
        ({"SLICE": "2"}, "UNTILDONE_SLICE 2 is not below the number of slices, 2"),
        ({"HOST": "2"}, "UNTILDONE_HOST 2 is not below UNTILDONE_HOSTS 2"),
        ({"HOST_PROCESS": "-1"}, "UNTILDONE_HOST_PROCESS -1 is not below UNTILDONE_HOST_PROCESSES 2"),
        ({"HOSTS": "3"}, "UNTILDONE_PROCESS_COUNT 8 is no whole number of slices"),
        ({"HOSTS": "0"}, "UNTILDONE_HOSTS must be at least 1"),
    ],
)
def test_a_wrong_place_is_named(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], said: str) -> None:
    place(monkeypatch, **changes)
    with pytest.raises(ConfigurationError, match=said):
        gang_environment(GIVEN)


def prepared(
    monkeypatch: pytest.MonkeyPatch, family: str, devices: int, processes: int, **before: str
) -> dict[str, str]:
    """What `prepare_jax` leaves in the environment."""
    for name in VARIABLES:
        monkeypatch.setenv(name, before.get(name, ""))  # restored afterwards
    plan = Plan(
        device_type=f"{family}-{devices}",
        processes=processes,
        devices=devices,
        global_batch=devices,
        data_parallel=devices,
        micro_batch=1,
        accumulation=1,
    )
    prepare_jax(plan, None, family)
    return {name: os.environ[name] for name in VARIABLES}


def test_prepare_jax_keeps_other_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    given_flags = "--xla_other=1 --xla_force_host_platform_device_count=64"
    found = prepared(monkeypatch, "cpu", 8, 2, XLA_FLAGS=given_flags)
    assert found["XLA_FLAGS"] == "--xla_other=1 --xla_force_host_platform_device_count=4"
    assert found["JAX_PLATFORMS"] == "cpu"


def test_on_tpus_the_devices_are_not_chosen_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found = prepared(monkeypatch, "tpu7x", 16, 4)
    assert (found["JAX_PLATFORMS"], found["XLA_FLAGS"], found["JAX_CPU_COLLECTIVES_IMPLEMENTATION"]) == ("", "", "")


def test_cpus_that_stand_in_for_tpus_talk_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--xla_force_host_platform_device_count=4"
    found = prepared(monkeypatch, "tpu7x", 16, 4, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    assert (found["JAX_CPU_COLLECTIVES_IMPLEMENTATION"], found["XLA_FLAGS"]) == ("gloo", flags)
