"""Device types: the arithmetic of facts every plan is built on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import ConfigurationError
from trainer.hardware import device_type, device_types

# Topology, chips, hosts, tpu7x devices, v5p devices.
TABLE = [
    ("2x4x4", 32, 8, 64, 32),
    ("4x4x4", 64, 16, 128, 64),
    ("4x4x8", 128, 32, 256, 128),
    ("4x4x12", 192, 48, 384, 192),
    ("4x8x8", 256, 64, 512, 256),
    ("4x8x12", 384, 96, 768, 384),
    ("8x8x8", 512, 128, 1024, 512),
]


@pytest.mark.parametrize(("topology", "chips", "hosts", "tpu7x", "v5p"), TABLE)
def test_a_topology_has_twice_the_devices_on_ironwood(
    topology: str, chips: int, hosts: int, tpu7x: int, v5p: int
) -> None:
    new, old = device_type(f"tpu7x-{topology}"), device_type(f"v5p-{topology}")
    assert (new.chips, new.hosts, new.devices) == (chips, hosts, tpu7x)
    assert (old.chips, old.hosts, old.devices) == (chips, hosts, v5p)
    assert new.chips_per_host == old.chips_per_host == 4
    assert (new.gke_topology, new.gke_accelerator, old.gke_accelerator) == (topology, "tpu7x", "tpu-v5p-slice")


@pytest.mark.parametrize(
    ("given_name", "canonical"),
    [
        ("v7x-4x8x8", "tpu7x-4x8x8"),
        ("tpu7x-128", "tpu7x-4x4x4"),
        ("v5p-128", "v5p-4x4x4"),
        ("v5p-8", "v5p-2x2x1"),
        ("V5P-8x4x4", "v5p-4x4x8"),
        ("v5litepod-16", "v5e-4x4"),
        ("v6e-8", "v6e-2x4"),
        ("cpu-8", "cpu-8"),
    ],
)
def test_other_spellings_lead_to_the_canonical_name(given_name: str, canonical: str) -> None:
    assert device_type(given_name).name == canonical


@pytest.mark.parametrize(
    ("name", "processes", "each"), [("cpu-8", 2, 4), ("cpu-4", 1, 4), ("cpu-2", 1, 2), ("cpu-1", 1, 1)]
)
def test_cpu_devices_come_four_to_a_process(name: str, processes: int, each: int) -> None:
    cpu = device_type(name)
    assert (cpu.processes, cpu.devices_per_process, cpu.hbm_gib_per_device) == (processes, each, None)


def test_memory_and_peak_are_per_device() -> None:
    new, old = device_type("tpu7x-4x4x4"), device_type("v5p-4x4x4")
    assert (new.hbm_gib_per_device, new.peak_flops_per_device) == (94.74, 1153.5e12)
    assert (old.hbm_gib_per_device, old.peak_flops_per_device) == (95.73, 459e12)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tpu7-4x4x4", "tpu7x-4x4x4"),
        ("v5p-100", "v5p-4x4x4"),
        ("v5p-4x4", "v5p-2x2x4"),
        ("v6e-3x3", "v6e-2x4"),
        ("cpu-6", "cpu-8"),
        ("cpu-0", "cpu-1"),
        ("h100-8", "tpu7x"),
        ("", "Families"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigurationError, match=nearest):
        device_type(name)


@given(st.sampled_from([d for family in ("cpu", "v5e", "v5p", "v6e", "tpu7x") for d in device_types(family)]))
def test_every_device_type_is_whole_and_found_by_its_own_name(device) -> None:  # type: ignore[no-untyped-def]
    assert device_type(device.name) == device
    assert device.devices == device.processes * device.devices_per_process
    assert device.chips == device.hosts * device.chips_per_host
