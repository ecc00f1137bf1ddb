"""Compile one plan of a recipe in a subprocess and account for it; from the cache where it was done before. No JAX."""

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import ConfigurationError, TrainerError
from trainer.hardware import DeviceType, device_type
from trainer.plan import Plan
from trainer.preflight import cache
from trainer.preflight.accounting import Report, account
from trainer.preflight.cycles import CLOCK
from trainer.recipe import Recipe

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask a metadata server that only a TPU host has
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process may have it loaded
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def preflight(
    recipe: Recipe,
    plan: Plan,
    compiler_options: dict[str, str] | None = None,
    keep_text: Path | None = None,
    fresh: bool = False,
    timeout: float = 3600,
) -> Report:
    """The report of `plan`. Takes minutes and gigabytes unless it is cached (`fresh` does not look).

    `keep_text` is where the optimised program is copied to. Raises ConfigurationError where no TPU compiler is
    installed, or none knows the device type; TrainerError when the process that compiles dies of something else.
    """
    kind = device_type(plan.device_type)
    check(kind)
    options, installed = compiler_options or {}, cache.versions()
    key = cache.program(recipe, plan, options, installed)
    found = None if fresh else cache.find(key)
    if found is None:
        with one_at_a_time(), tempfile.TemporaryDirectory(prefix="untildone-preflight-") as out:
            found = None if fresh else cache.find(key)  # whoever had the lock may have compiled the same
            if found is None:
                found = _compile(recipe, plan, options, Path(out), timeout)
                cache.keep(key, *found)
    outcome, text = found
    if keep_text and text is not None:
        keep_text.write_text(text)
    common = {
        "recipe": recipe.name,
        "plan": plan.model_dump(mode="json"),
        "compiler_options": options,
        "versions": installed,
        "program": key,
    }
    return account(recipe, plan, kind, outcome, text, common)


def _compile(
    recipe: Recipe, plan: Plan, options: dict[str, str], out: Path, timeout: float
) -> tuple[dict[str, Any], str | None]:
    """The outcome and, if there is one, the program's text."""
    outcome, program = _work(recipe, plan, options, out, timeout), out / "program.hlo"
    return outcome, program.read_text() if program.is_file() else None


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """A compilation takes gigabytes and all cores: those of one user on one machine wait for each other."""
    cache.folder().mkdir(parents=True, exist_ok=True)
    with (cache.folder() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("preflight: waiting for another compilation on this machine", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check(kind: DeviceType) -> None:
    """Raises ConfigurationError where nothing can be compiled for `kind`."""
    if kind.family not in CLOCK:
        raise ConfigurationError(
            f"device {kind.name!r}: preflight compiles for {', '.join(CLOCK)}; choose a slice of one of them"
        )
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ConfigurationError(
            "preflight needs the TPU compiler, libtpu, which runs on any x86-64 Linux: pip install 'jax[tpu]', "
            "or name the library in TPU_LIBRARY_PATH"
        )


def _work(recipe: Recipe, plan: Plan, options: dict[str, str], out: Path, timeout: float) -> dict[str, Any]:
    request = out / "request.json"
    request.write_text(
        json.dumps(
            {
                "recipe": recipe.model_dump(mode="json"),
                "plan": plan.model_dump(mode="json"),
                "compiler_options": options,
                "out": str(out),
            }
        )
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    command = [sys.executable, "-m", "trainer.preflight.worker", str(request)]
    errors = out / "stderr"
    root = Path(__file__).parent.parent.parent
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command, env={**environment, **ENVIRONMENT, "PYTHONPATH": path}, stdout=stderr, stderr=stderr, cwd=out
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ConfigurationError(
                f"preflight of {plan.device_type}: not compiled within {timeout:.0f} s; give it more with --timeout"
            ) from None
        finally:
            process.kill()
            process.wait()
    done = out / "compiled.json"
    if done.is_file():
        return json.loads(done.read_text())
    tail = " ".join(line for line in errors.read_text(errors="replace").splitlines()[-3:])
    raise TrainerError(f"preflight of {plan.device_type}: the process that compiles ended with code {code}: {tail}")
