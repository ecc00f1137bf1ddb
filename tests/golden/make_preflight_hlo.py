"""Writes preflight.hlo.gz and preflight.json: the small recipe's optimised program, and what was reported of it.

    python tests/golden/make_preflight_hlo.py

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
from trainer.preflight.plans import plan_of
from trainer.preflight.preflight import preflight

HERE = Path(__file__).parent
KEPT = ("estimated_cycles", "cost_estimate")
_CONFIG = re.compile(r'"(body|flag_configs|scoped_memory_configs|used_scoped_memory_configs)":("[^"]*"|\[[^\]]*\]),?')

_LARGE = re.compile(r"constant\(\{[^)]{5000,}\}\)")  # the tables of rotary positions, not the masks of attention


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
        lines.append(_LARGE.sub("constant({...})", line))
    return "\n".join(lines)


def main() -> None:
    plan = plan_of(recipe(), device_type(DEVICE), 1, 1, "none")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "program.hlo"
        report = preflight(recipe(), plan, keep_text=path)
        text = shortened(path.read_text())
    (HERE / "preflight.hlo.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    body = report.to_json()
    (HERE / "preflight.json").write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
