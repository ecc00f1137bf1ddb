"""What a process of a gang is told from outside, and what it sets before JAX is imported.

Its rank is told either as a number, or, in a pod, as its place: which slice, which host of the slice, which process of
the host. Pods of one template get the same variables, filled in from their labels, so no number can stand there.
"""

import os
from dataclasses import dataclass, fields
from typing import Any

from trainer.errors import ConfigurationError
from trainer.plan import Plan

PREFIX = "UNTILDONE_"
PLACE = ("SLICE", "HOST", "HOST_PROCESS", "HOSTS", "HOST_PROCESSES")


@dataclass(frozen=True)
class GangEnvironment:
    """The environment of `python -m trainer train`; each field is a variable UNTILDONE_<FIELD> and an option."""

    run_directory: str
    attempt: int
    nonce: str
    pod_uid: str
    restart_attempt: int
    process_id: int
    process_count: int
    coordinator: str


def gang_environment(given: dict[str, str | None]) -> GangEnvironment:
    """From options (by field name), else from the environment. Raises ConfigurationError naming what is missing."""
    values: dict[str, Any] = {}
    for field in fields(GangEnvironment):
        variable = PREFIX + field.name.upper()
        value = given.get(field.name)
        text = os.environ.get(variable) if value is None else value
        if text is None or text == "":
            if field.name == "process_id" and any(os.environ.get(PREFIX + name) for name in PLACE):
                continue
            option = "--" + field.name.replace("_", "-")
            place = ", or its place in UNTILDONE_SLICE, _HOST and _HOST_PROCESS" if field.name == "process_id" else ""
            raise ConfigurationError(
                f"{variable} is not set: a process of a gang needs it (or the option {option}{place})"
            )
        values[field.name] = _number(variable, text) if field.type is int else text
    if "process_id" not in values:
        values["process_id"] = _rank(values["process_count"])
    environment = GangEnvironment(**values)
    if not 0 <= environment.process_id < environment.process_count:
        rank, count = environment.process_id, environment.process_count
        raise ConfigurationError(f"{PREFIX}PROCESS_ID {rank} is not below {PREFIX}PROCESS_COUNT {count}")
    return environment


def _rank(process_count: int) -> int:
    """The rank at this place: slices one after another, in each its hosts, on each its processes.

    Raises ConfigurationError naming the variable that is missing, or that does not fit the others.
    """
    place = {}
    for name in PLACE:
        text = os.environ.get(PREFIX + name, "")
        if not text:
            needed = ", ".join(PREFIX + other for other in PLACE)
            raise ConfigurationError(
                f"{PREFIX}{name} is not set: without {PREFIX}PROCESS_ID a process needs all of {needed}"
            )
        place[name] = _number(PREFIX + name, text)
    slice_, host, process, hosts, processes = (place[name] for name in PLACE)
    for name, most in (("HOSTS", hosts), ("HOST_PROCESSES", processes)):
        if most < 1:
            raise ConfigurationError(f"{PREFIX}{name} must be at least 1 (got {most})")
    if process_count % (hosts * processes):
        raise ConfigurationError(
            f"{PREFIX}PROCESS_COUNT {process_count} is no whole number of slices of {PREFIX}HOSTS {hosts} × "
            f"{PREFIX}HOST_PROCESSES {processes}: the pods were made for another plan"
        )
    slices = process_count // (hosts * processes)
    for name, value, what, limit in (
        ("SLICE", slice_, "the number of slices,", slices),
        ("HOST", host, f"{PREFIX}HOSTS", hosts),
        ("HOST_PROCESS", process, f"{PREFIX}HOST_PROCESSES", processes),
    ):
        if not 0 <= value < limit:
            raise ConfigurationError(f"{PREFIX}{name} {value} is not below {what} {limit}")
    return (slice_ * hosts + host) * processes + process


def _number(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{variable} must be a whole number (got {text!r})") from None


def prepare_jax(plan: Plan, compile_cache: str | None, family: str) -> None:
    """Set what JAX and XLA read at import.

    On the CPU the plan says how many devices this process shows; other flags in XLA_FLAGS are kept. On TPUs nothing
    is chosen here: which chips a process gets, also where a host runs two, is between libtpu and what GKE puts into
    the container. With JAX_PLATFORMS=cpu the devices that XLA_FLAGS asks for stand in for the chips.
    """
    stand_in = family != "cpu" and os.environ.get("JAX_PLATFORMS") == "cpu"
    if (family == "cpu" or stand_in) and plan.processes > 1:  # one process: see trainer.distributed.join
        os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    if family == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        kept = [
            flag
            for flag in os.environ.get("XLA_FLAGS", "").split()
            if not flag.startswith("--xla_force_host_platform_device_count")
        ]
        count = f"--xla_force_host_platform_device_count={plan.devices_per_process}"
        os.environ["XLA_FLAGS"] = " ".join([*kept, count])
    if compile_cache:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = compile_cache
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"  # those are GPUs', and want a folder
    # What gRPC and absl print at start-up is noise beside our own lines.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
