"""Writes preflight.hlo.gz and preflight.json: the small recipe's optimised program, and what was reported of it.

    python tests/golden/make_preflight_hlo.py            # compiles: after the step has changed
    python tests/golden/make_preflight_hlo.py --report   # the report alone: after the analysis has changed

Needs libtpu, no TPU. Kernels' machine code and what the accounts do not read is cut out of the text, to keep it small.
"""

import gzip
import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.preflight import DEVICE, recipe
from trainer.hardware import device_type
from trainer.plan import Plan
from trainer.preflight.accounting import GIB, Report, account
from trainer.preflight.plans import plan_of
from trainer.preflight.preflight import preflight

HERE = Path(__file__).parent
KEPT = ("estimated_cycles", "cost_estimate")
_CONFIG = re.compile(r'"(body|flag_configs|scoped_memory_configs|used_scoped_memory_configs)":("[^"]*"|\[[^\]]*\]),?')


def shortened(text: str) -> str:
    """The text without kernels' bodies and without configurations of the back end that say no cycles."""
    lines = []
    for line in text.split("\n"):
        head, sign, config = line.partition(", backend_config=")
        if sign and not any(word in config for word in KEPT):
            line = head
        elif sign:
            cycles = re.search(r'"estimated_cycles":"\d+"', config)
            line = head + sign + "{" + cycles[0] + "}" if cycles else _CONFIG.sub("", line)
        lines.append(line)
    return "\n".join(lines)


def compiled(plan: Plan) -> tuple[str, Report]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "program.hlo"
        report = preflight(recipe(), plan, keep_text=path)
        return shortened(path.read_text()), report


def accounted_anew(plan: Plan, text: str) -> Report:
    """The committed report with what the present analysis makes of the committed text."""
    old = json.loads((HERE / "preflight.json").read_text())
    outcome = {
        "error": None,
        "compile_seconds": old["compile_seconds"],
        "memory": {"peak_memory": old["peak_gib"] * GIB},
    }
    common = {name: old[name] for name in ("recipe", "plan", "compiler_options", "versions", "program")}
    return account(recipe(), plan, device_type(DEVICE), outcome, text, common)


def main() -> None:
    plan, packed = plan_of(recipe(), device_type(DEVICE), 1, 1, "none"), HERE / "preflight.hlo.gz"
    if "--report" in sys.argv:
        report = accounted_anew(plan, gzip.decompress(packed.read_bytes()).decode())
    else:
        text, report = compiled(plan)
        packed.write_bytes(gzip.compress(text.encode(), mtime=0))
    (HERE / "preflight.json").write_text(json.dumps(report.to_json(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
