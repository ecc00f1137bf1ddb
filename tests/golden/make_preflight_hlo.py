"""Writes preflight_step.json, what preflight reports of the small recipe's step as it stands, and preflight.json.

    python tests/golden/make_preflight_hlo.py step       # after the step has changed; needs libtpu, no TPU
    python tests/golden/make_preflight_hlo.py report     # after the analysis has changed: preflight.json anew

preflight.hlo.gz is the optimised program of that recipe when its attention was JAX's splash kernels, written by this script
at commit 38d4d27; kernels' machine code and what the accounts do not read is cut out. preflight.json is what is reported of it.
"""

import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.preflight import DEVICE, recipe
from trainer.hardware import device_type
from trainer.preflight.accounting import GIB, Report, account
from trainer.preflight.plans import plan_of
from trainer.preflight.preflight import preflight

HERE = Path(__file__).parent
PLAN = plan_of(recipe(), device_type(DEVICE), 1, 1, "none")


def accounted_anew(text: str) -> Report:
    """The committed report with what the present analysis makes of the committed text."""
    old = json.loads((HERE / "preflight.json").read_text())
    outcome = {
        "error": None,
        "compile_seconds": old["compile_seconds"],
        "memory": {"peak_memory": old["peak_gib"] * GIB},
    }
    common = {name: old[name] for name in ("recipe", "plan", "compiler_options", "versions", "program")}
    return account(recipe(), PLAN, device_type(DEVICE), outcome, text, common)


def main(what: str) -> None:
    if what == "report":
        text = gzip.decompress((HERE / "preflight.hlo.gz").read_bytes()).decode()
        report, name = accounted_anew(text), "preflight.json"
    else:
        report, name = preflight(recipe(), PLAN), "preflight_step.json"
        assert report.verdict == "fits", report.reason
    (HERE / name).write_text(json.dumps(report.to_json(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
