"""How the commands speak: columns, JSON documents, and whether a person watches.

One rule for all verbs: rich and colour only on a terminal (NO_COLOR obeyed), plain text when piped, and with --json exactly one
document on stdout. Only errors and notes go to stderr.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from orchestrator.durations import about

API_VERSION = "untildone.dev/v1alpha1"

STATUS_COLOURS = {
    "Completed": "green",
    "Training": "green",
    "Saving": "green",
    "Queued": "yellow",
    "Preempted": "yellow",
    "BackingOff": "yellow",
    "Switching": "yellow",
    "Suspended": "yellow",
    "TruthUnknown": "magenta",
    "BudgetExhausted": "red",
    "Refused": "red",
    "FAIL": "red",
    "PASS": "green",
}


def on_terminal() -> bool:
    """Whether stdout is a terminal that takes more than plain text."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def colour_wanted() -> bool:
    return on_terminal() and not os.environ.get("NO_COLOR")


def painted(word: str) -> str:
    """`word` in its colour on a terminal, as it is elsewhere."""
    colour = STATUS_COLOURS.get(word)
    return click.style(word, fg=colour) if colour and colour_wanted() else word


def write_json(kind: str, body: Mapping[str, Any]) -> None:
    """The one JSON document of this call."""
    click.echo(json.dumps({"apiVersion": API_VERSION, "kind": kind, **body}, indent=2, ensure_ascii=False))


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns, two spaces apart, no trailing blanks; the first line is `header`."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = []
    for row in table:
        cells = [cell + " " * (width - len(cell)) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    if colour_wanted():
        lines = [_paint_first_match(line) for line in lines]
    return "\n".join(lines)


def _paint_first_match(line: str) -> str:
    for word in STATUS_COLOURS:
        if f" {word} " in f" {line} ":
            return line.replace(word, painted(word), 1)
    return line


def duration(seconds: float | None) -> str:
    """A length of time as people write it: 4s, 2m05s, 3h12m, 2d04h."""
    return "-" if seconds is None else about(seconds)


def rate(value: float | None) -> str:
    """Tokens per second with a unit prefix: 950, 12.3k, 1.43M."""
    if value is None:
        return "-"
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


def timestamp(seconds: float | None) -> str | None:
    """RFC 3339 in UTC, to the second."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_option(_ctx: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    """Callback for durations on the command line: 300s, 5m, 1h30m, or plain seconds."""
    if value is None:
        return None
    import re

    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", value)
    if not match or not value:
        raise click.BadParameter(f"{value!r} is not a duration; write 300s, 5m or 1h30m")
    hours, minutes, seconds = match.groups()
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(seconds or 0)


def file_option[F: Callable[..., Any]](function: F) -> F:
    return click.option(
        "-f",
        "--file",
        "file",
        required=True,
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="The TrainingRun, as YAML.",
    )(function)


def json_option[F: Callable[..., Any]](function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(function)


def local_option[F: Callable[..., Any]](function: F) -> F:
    return click.option(
        "--local",
        metavar="DIR",
        type=click.Path(file_okay=False, path_type=Path),
        help="State folder of the local cluster.  [default: $XDG_STATE_HOME/untildone/local]",
    )(function)


def cluster_options[F: Callable[..., Any]](function: F) -> F:
    """--namespace, --kubeconfig and --context, as kubectl has them."""
    for option in (
        click.option("--context", metavar="NAME", help="Context of the kubeconfig."),
        click.option(
            "--kubeconfig", type=click.Path(dir_okay=False, path_type=Path), help="Default: as kubectl has it."
        ),
        click.option("-n", "--namespace", metavar="NAME", help="Of a TrainingRun in a Kubernetes cluster."),
    ):
        function = option(function)
    return function
