"""The table of maxtext_compiled: per slice one column for MaxText, one for ours, and ours ÷ theirs."""

from collections.abc import Iterable, Iterator
from typing import Any

GIB = 2**30
Row = tuple[str, str, str, str]  # what, MaxText's, ours, ours ÷ theirs
# What ours is to reach: "theirs" is MaxText's own figure.
GOALS = (
    ("executed ÷ model at most 1.00", lambda ours, _theirs, _family: executed(ours) <= 1.0),
    ("peak under 80 GiB", lambda ours, _theirs, _family: ours["peak_gib"] < 80),
    (
        "MFU ceiling at least 62 % on tpu7x, 75 % on v5p",
        lambda ours, _theirs, family: ours["mfu_ceiling"] >= {"tpu7x": 0.62, "v5p": 0.75}[family],
    ),
    ("compile time, CPU, not above theirs", lambda ours, theirs, _family: cpu(ours) <= cpu(theirs)),
)
HEADER = ("", "MaxText", "ours", "ours ÷ theirs")
INTRODUCTION = """# Beside MaxText, compiled

Written by `make bench-maxtext-compiled`; do not edit. OLMo 3 7B, stage 1, 512 instances of 8,192 tokens: MaxText 0.2.5 as its own
launcher starts it and this trainer as its planner does, compiled for the same slices by the same jax {jax}, jaxlib {jaxlib} and
libtpu {libtpu}, one after the other on one machine without a TPU. Nothing here was measured on hardware. Both programs are read
by the same accounts ([planning.md](planning.md) says what they count) against the same model FLOPs; attention kernels
by the blocks they execute. CPU seconds are those of all threads, from the start of the process: unlike
wall seconds, they hardly depend on what else the machine does. Bytes are of the whole arrays that are gathered or summed, per
device and step.
"""


def executed(row: dict[str, Any]) -> float:
    return float(row["flops"]["executed_over_model"])


def cpu(row: dict[str, Any], *phases: str) -> float:
    """Seconds of these phases, by default of all."""
    return sum(row["phases"][name]["cpu"] for name in phases or row["phases"])


def reached(row: dict[str, Any]) -> float:
    """The MFU ceiling when what the schedule does not hide is waited for."""
    floor = float(row["step_seconds_floor"])
    return float(row["mfu_ceiling"]) * floor / (floor + row["waiting_seconds"])


def hidden(row: dict[str, Any]) -> float:
    """Share of the transfers' seconds that the schedule hides."""
    alone = sum(item["seconds"] for item in row["communication"])
    return 1 - float(row["waiting_seconds"]) / alone


def rows(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[Row]:
    """Of two programs that fit."""

    def of(what: str, form: str, value: Any) -> Row:
        a, b = value(theirs), value(ours)
        return what, format(a, form), format(b, form), format(b / a, ".2f") if a else ""

    yield "settings", theirs["told"], ours["told"], ""
    yield of(f"peak memory, GiB of {ours['limit_gib']}", ".2f", lambda r: r["peak_gib"])
    yield of("executed ÷ model FLOPs", ".3f", executed)
    yield of("MFU ceiling", ".1%", lambda r: r["mfu_ceiling"])
    yield of("step ≥, seconds", ".3f", lambda r: r["step_seconds_floor"])
    kinds = {(item["kind"], item["dtype"]): 0 for row in (theirs, ours) for item in row["communication"]}
    for kind in kinds:
        sent = [
            sum(item["bytes"] for item in row["communication"] if (item["kind"], item["dtype"]) == kind) / GIB
            for row in (theirs, ours)
        ]
        if max(sent) >= 0.05:
            yield (
                f"{' '.join(kind)}, GiB",
                *(f"{gib:.1f}" for gib in sent),
                f"{sent[1] / sent[0]:.2f}" if sent[0] else "",
            )
    yield of("all, GiB", ".1f", lambda r: sum(item["bytes"] for item in r["communication"]) / GIB)
    yield of("seconds of it at the peak of the links", ".3f", lambda r: sum(i["seconds"] for i in r["communication"]))
    yield of("hidden by the schedule", ".0%", hidden)
    yield of("MFU ceiling with what is not hidden", ".1%", reached)
    yield of("compile, CPU seconds", ".0f", cpu)
    for what, name in (
        ("imports, configuration, shapes", "prepare"),
        ("tracing and lowering the step", "lower"),
        ("the compiler", "compile"),
    ):
        yield of(f"of these {what}", ".0f", lambda r, name=name: cpu(r, name))
    yield of("compile, wall seconds", ".0f", lambda r: sum(phase["wall"] for phase in r["phases"].values()))


def refused(attempts: list[dict[str, Any]]) -> Iterator[str]:
    """MaxText's attempts that came to nothing."""
    for row in attempts:
        if row["verdict"] != "fits":
            needs = "" if row["peak_gib"] is None else f", needs {row['peak_gib']:.2f} of {row['limit_gib']} GiB"
            yield f"MaxText {row['told']}: {row['verdict']}{needs}"


def goals(theirs: dict[str, Any], ours: dict[str, Any], family: str) -> Iterator[str]:
    for what, is_reached in GOALS:
        yield f"{what}: {'reached' if is_reached(ours, theirs, family) else 'not reached'}"


def text(results: dict[str, Any]) -> str:
    """For a terminal."""
    lines: list[str] = []
    for name, result in results.items():
        lines += ["", f"{name} (compiled, not run)", *refused(result["maxtext"])]
        theirs, ours = result["maxtext"][-1], result["ours"]
        if theirs["verdict"] == ours["verdict"] == "fits":
            table = [HEADER, *rows(theirs, ours)]
            widths = [max(len(row[i]) for row in table) for i in range(len(HEADER))]
            lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
            lines += goals(theirs, ours, name.partition("-")[0])
        else:
            lines.append(f"ours {ours['told']}: {ours['verdict']} {ours['reason']}".rstrip())
    return "\n".join(lines).lstrip()


def markdown(results: dict[str, Any], slices: Iterable[str]) -> str:
    """The page, with a section for every slice."""
    lines: list[str] = []
    for name in slices:
        lines += ["", f"## {name}", ""]
        if name not in results:
            lines.append(f"Not compiled yet: `python benchmarks/maxtext_compiled.py --slice {name}`")
            continue
        result = results[name]
        theirs, ours = result["maxtext"][-1], result["ours"]
        if theirs["verdict"] == ours["verdict"] == "fits":
            lines += [f"| {' | '.join(row)} |" for row in (HEADER, ("---",) * len(HEADER), *rows(theirs, ours))]
        else:
            lines.append(f"Ours, {ours['told']}: {ours['verdict']}.")
        lines += ["", *(f"- {line}" for line in refused(result["maxtext"]))]
        if theirs["verdict"] == ours["verdict"] == "fits":
            lines += [f"- {line}" for line in goals(theirs, ours, name.partition("-")[0])]
    versions = next(iter(results.values()))["ours"]["versions"]
    return INTRODUCTION.format(**versions) + "\n".join(lines) + "\n"
