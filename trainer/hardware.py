"""Device types: facts about the machines a plan can be made for, and nothing that needs JAX.

A device type is a TPU generation with a topology (`tpu7x-4x8x8`, `v5p-4x4x4`, `v6e-8x8`), or `cpu-N`: N JAX devices on
this machine. Names that count TensorCores (`tpu7x-128`, `v5p-128`) or chips (`v6e-64`) and the older spellings are
accepted; the canonical name is the one with the topology.

Sources: GKE's TPU documentation and xpk's system_characteristics.py for labels and machine types. The memory is what
the TPU compiler allows per device, the peak is the vendor's dense bf16 figure. Links: Cloud TPU's documentation gives GB/s
per chip, all links and both directions together (1200 v5p and TPU7x, 800 v6e, 400 v5e), and says of TPU7x's two dies that
they are joined six times as fast as by one link.
"""

import difflib
import math
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from typing import Literal

from trainer.errors import ConfigurationError

Family = Literal["cpu", "v5e", "v5p", "v6e", "tpu7x"]
CPU_DEVICES_PER_PROCESS = 4


@dataclass(frozen=True)
class DeviceType:
    """One slice: `chips` on `hosts`, seen by JAX as `devices` in `processes` processes."""

    name: str  # canonical
    family: Family
    topology: str  # "4x8x8"; for cpu the number of devices
    chips: int
    hosts: int
    processes_per_host: int
    devices: int
    hbm_gib_per_device: float | None  # None: not bounded by an accelerator's memory
    peak_flops_per_device: float | None  # dense bf16 FLOP/s; None: no meaningful figure, so no MFU
    links_bytes_per_second: float | None  # a device's share of all its chip's links, one direction; None: no links
    die_link_bytes_per_second: float | None  # between the devices of a chip; None: a chip is one device
    gke_accelerator: str | None  # node label cloud.google.com/gke-tpu-accelerator
    gke_topology: str | None  # node label cloud.google.com/gke-tpu-topology
    machine_type: str | None

    @property
    def processes(self) -> int:
        return self.hosts * self.processes_per_host

    @property
    def devices_per_process(self) -> int:
        return self.devices // self.processes

    @property
    def chips_per_host(self) -> int:
        """The google.com/tpu resource of one host."""
        return self.chips // self.hosts


@dataclass(frozen=True)
class _Generation:
    family: Family
    aliases: tuple[str, ...]
    dims: int
    cores_in_name: int  # what the number in NAME-N counts, per chip
    devices_per_chip: int
    processes_per_host: int
    hbm_gib: float
    peak_flops: float
    link: float  # bytes per second
    accelerator: str
    machine: str  # with {} for the chips of a host
    max_chips: int


GENERATIONS = (
    _Generation(
        "tpu7x", ("v7x", "tpu-v7x", "ironwood"), 3, 2, 2, 2, 94.74, 1153.5e12, 1e11, "tpu7x", "tpu7x-standard-{}t", 9216
    ),  # two processes per host: one per NUMA node, as xpk runs it
    _Generation("v5p", ("tpu-v5p",), 3, 2, 1, 1, 95.73, 459e12, 1e11, "tpu-v5p-slice", "ct5p-hightpu-{}t", 6144),
    _Generation(
        "v6e", ("tpu-v6e", "trillium"), 2, 1, 1, 1, 31.25, 918e12, 1e11, "tpu-v6e-slice", "ct6e-standard-{}t", 256
    ),
    _Generation(
        "v5e",
        ("v5litepod", "tpu-v5e"),
        2,
        1,
        1,
        1,
        15.75,
        197e12,
        5e10,
        "tpu-v5-lite-podslice",
        "ct5lp-hightpu-{}t",
        256,
    ),
)
DIES = 6  # times one link, between the two dies of a chip
SMALL_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # below 4x4x4, where every side is a multiple of 4
SHAPES_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))


def device_type(name: str) -> DeviceType:
    """The device type called `name`, in any accepted spelling.

    Raises ConfigurationError for a name that is no device type, with the nearest ones.
    """
    given = name.strip().lower()
    family, _, rest = given.rpartition("-")
    if family == "cpu":
        return _cpu(name, rest)
    generation = next((g for g in GENERATIONS if family in (g.family, *g.aliases)), None)
    if generation is None:
        known = ["cpu", *(spelling for g in GENERATIONS for spelling in (g.family, *g.aliases))]
        similar = difflib.get_close_matches(family or given, known, n=1, cutoff=0.4)
        start = similar[0] if similar else "tpu7x"
        example = "cpu-8" if start == "cpu" else f"{start}-4x4" if start[:3] in ("v5e", "v6e") else f"{start}-4x4x4"
        families = ", ".join(["cpu", *(g.family for g in GENERATIONS)])
        raise ConfigurationError(
            f"deviceType {name!r}: unknown family; did you mean e.g. {example!r}? Families: {families}"
        )
    shape = _shape(generation, rest)
    if shape is None or shape not in _shapes(generation):
        near = ", ".join(_nearest(generation, rest))
        raise ConfigurationError(f"deviceType {name!r}: no such slice of {generation.family}; nearest: {near}")
    return _tpu(generation, shape)


def device_types(family: Family) -> tuple[DeviceType, ...]:
    """All slices of a TPU family by rising number of chips; of cpu, those up to 8 devices."""
    if family == "cpu":
        return tuple(_cpu(f"cpu-{n}", str(n)) for n in (1, 2, 4, 8))
    generation = next(g for g in GENERATIONS if g.family == family)
    return tuple(_tpu(generation, shape) for shape in _shapes(generation))


def _cpu(name: str, rest: str) -> DeviceType:
    devices = int(rest) if rest.isdecimal() else 0
    per_process = CPU_DEVICES_PER_PROCESS
    if devices < 1 or (devices > per_process and devices % per_process):
        lower = max(devices // per_process * per_process, 1)
        near = ", ".join(f"cpu-{n}" for n in sorted({lower, lower // per_process * per_process + per_process}))
        raise ConfigurationError(
            f"deviceType {name!r}: devices come {per_process} to a process, or all in one below that; nearest: {near}"
        )
    return DeviceType(
        name=f"cpu-{devices}",
        family="cpu",
        topology=str(devices),
        chips=0,
        hosts=1,
        processes_per_host=max(1, devices // per_process),
        devices=devices,
        hbm_gib_per_device=None,
        peak_flops_per_device=None,
        links_bytes_per_second=None,
        die_link_bytes_per_second=None,
        gke_accelerator=None,
        gke_topology=None,
        machine_type=None,
    )


def _tpu(generation: _Generation, shape: tuple[int, ...]) -> DeviceType:
    chips, topology = math.prod(shape), "x".join(map(str, shape))
    # 2x4 is one machine of 8 chips; all larger slices are made of machines with 4.
    per_host = chips if chips <= 4 or shape == (2, 4) else 4
    # A host with a single chip has nothing to divide between two processes.
    processes = generation.processes_per_host if per_host > 1 else 1
    return DeviceType(
        name=f"{generation.family}-{topology}",
        family=generation.family,
        topology=topology,
        chips=chips,
        hosts=chips // per_host,
        processes_per_host=processes,
        devices=chips * generation.devices_per_chip,
        hbm_gib_per_device=generation.hbm_gib,
        peak_flops_per_device=generation.peak_flops,
        links_bytes_per_second=2 * generation.dims * generation.link / generation.devices_per_chip,
        die_link_bytes_per_second=DIES * generation.link if generation.devices_per_chip > 1 else None,
        gke_accelerator=generation.accelerator,
        gke_topology=topology,
        machine_type=generation.machine.format(per_host),
    )


@cache
def _shapes(generation: _Generation) -> tuple[tuple[int, ...], ...]:
    """The topologies on offer, by rising number of chips and, among equals, the most cubic first."""
    if generation.dims == 2:
        return SHAPES_2D
    sides = range(4, 33, 4)
    large = [s for s in combinations_with_replacement(sides, 3) if math.prod(s) <= generation.max_chips]
    single = [(1, 1, 1)] if generation.family == "tpu7x" else []  # the only 3D one with a single-chip machine
    return tuple(sorted([*single, *SMALL_3D, *large], key=lambda s: (math.prod(s), max(s))))


def _shape(generation: _Generation, rest: str) -> tuple[int, ...] | None:
    """The topology that `rest` means: its sides, or a number of cores, of which the most cubic slice is taken."""
    parts = rest.split("x")
    if not all(part.isdecimal() for part in parts):
        return None
    if len(parts) > 1:
        sides = tuple(int(part) for part in parts)
        return next((s for s in _shapes(generation) if sorted(s) == sorted(sides)), sides)
    chips = int(parts[0]) / generation.cores_in_name
    return next((s for s in _shapes(generation) if math.prod(s) == chips), None)


def _nearest(generation: _Generation, rest: str) -> list[str]:
    """Up to three slices of about the size that was asked for; the smallest when `rest` says no size."""
    numbers = [int(part) for part in rest.split("x") if part.isdecimal()]
    wanted = math.prod(numbers) if len(numbers) > 1 else (numbers[0] / generation.cores_in_name if numbers else 0)
    chosen = sorted(_shapes(generation), key=lambda s: abs(math.log2(math.prod(s)) - math.log2(max(wanted, 1))))[:3]
    return [_tpu(generation, shape).name for shape in sorted(chosen, key=math.prod)]
