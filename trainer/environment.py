"""What a process of a gang is told from outside, and what it sets before JAX is imported."""

import os
from dataclasses import dataclass, fields
from typing import Any

from trainer.errors import ConfigurationError
from trainer.plan import Plan

PREFIX = "UNTILDONE_"


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
            option = "--" + field.name.replace("_", "-")
            raise ConfigurationError(f"{variable} is not set: a process of a gang needs it (or the option {option})")
        values[field.name] = _parse(variable, text, field.type)
    environment = GangEnvironment(**values)
    if not 0 <= environment.process_id < environment.process_count:
        rank, count = environment.process_id, environment.process_count
        raise ConfigurationError(f"{PREFIX}PROCESS_ID {rank} is not below {PREFIX}PROCESS_COUNT {count}")
    return environment


def _parse(variable: str, text: str, kind: object) -> int | str:
    if kind is not int:
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{variable} must be a whole number (got {text!r})") from None


def prepare_jax(plan: Plan, compile_cache: str | None, family: str) -> None:
    """Set what JAX and XLA read at import.

    On the CPU the plan says how many devices this process shows; other flags in XLA_FLAGS are kept.
    """
    if family == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        if plan.processes > 1:  # one process has cheaper collectives of its own
            os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
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
    # What gRPC and absl print at start-up is noise beside our own lines.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
