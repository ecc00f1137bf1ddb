"""The table of benchmarks/maxtext_compiled.py, from a committed report and one made worse."""

import json
from pathlib import Path
from typing import Any

from benchmarks.maxtext_compiled_table import markdown, text

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "preflight.json").read_text())


def program(seconds: float, flops: float, **changes: Any) -> dict[str, Any]:
    """A row whose compilation took `seconds` in each of three phases and that executes `flops` × the model's."""
    phases = {name: {"cpu": seconds, "wall": 2 * seconds} for name in ("prepare", "lower", "compile")}
    body = GOLDEN | {"told": "as shipped", "phases": phases, "mfu_ceiling": 0.5, "limit_gib": 94.74} | changes
    return body | {"flops": body["flops"] | {"executed_over_model": flops}}


REFUSED = program(1, 1, verdict="out of memory", peak_gib=188.3, told="as shipped")
THEIRS = program(100, 1.2, told="as shipped out_proj=remat", peak_gib=90.0)
OURS = program(80, 0.9, mfu_ceiling=0.6, peak_gib=60.0)
RESULTS = {"v5p-4x4x4": {"maxtext": [REFUSED, THEIRS], "ours": OURS}}


def test_each_figure_stands_beside_theirs_with_the_ratio() -> None:
    lines = {
        tuple(" ".join(line.split()).split("|")[1:5])
        for line in markdown(RESULTS, ["v5p-4x4x8", "v5p-4x4x4"]).splitlines()
    }
    cells = {tuple(cell.strip() for cell in line) for line in lines if len(line) == 4}
    assert ("executed ÷ model FLOPs", "1.200", "0.900", "0.75") in cells
    assert ("peak memory, GiB of 94.74", "90.00", "60.00", "0.67") in cells
    assert ("compile, CPU seconds", "300", "240", "0.80") in cells
    assert ("MFU ceiling", "50.0%", "60.0%", "1.20") in cells


def test_a_slice_that_was_not_compiled_has_its_command() -> None:
    page = markdown(RESULTS, ["v5p-4x4x8", "v5p-4x4x4"])
    assert "## v5p-4x4x8\n\nNot compiled yet: `python benchmarks/maxtext_compiled.py --slice v5p-4x4x8`" in page


def test_refused_attempts_and_goals_are_said() -> None:
    shown = text(RESULTS)
    assert "MaxText as shipped: out of memory, needs 188.30 of 94.74 GiB" in shown
    assert "executed ÷ model at most 1.00: reached" in shown
    assert "62 % on tpu7x, 75 % on v5p: not reached" in shown
    slow = {"v5p-4x4x4": RESULTS["v5p-4x4x4"] | {"ours": program(101, 0.9)}}
    assert "compile time, CPU, not above theirs: not reached" in text(slow)


def test_a_program_of_ours_that_does_not_fit_has_no_table() -> None:
    broken = program(1, 1, verdict="out of memory", told="2 × 4 × 64", reason="RESOURCE_EXHAUSTED")
    shown = text({"v5p-4x4x4": {"maxtext": [THEIRS], "ours": broken}})
    assert "ours 2 × 4 × 64: out of memory RESOURCE_EXHAUSTED" in shown
    assert "executed" not in shown
