"""Puts a report together: reads, verifies, draws, and writes report.html, the PNGs and summary.json into one folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.report import plots
from orchestrator.report.collect import RunHistory, collect
from orchestrator.report.page import Pictures, page
from orchestrator.report.style import DARK, LIGHT
from orchestrator.report.summary import summary
from orchestrator.verify import Verdict
from trainer.errors import ConfigurationError
from trainer.rundir.rundir import RunDirectory


@dataclass(frozen=True)
class Report:
    """What was written, and the figures in it."""

    html: Path
    files: tuple[Path, ...]
    summary: dict[str, Any]
    verdict: Verdict
    run: RunHistory


def write_report(rundir: RunDirectory, reference: RunDirectory | None, folder: Path, unfinished: bool = True) -> Report:
    """Everything about the run in `rundir` into `folder`, compared with `reference` if there is one.

    Raises ConfigurationError when `rundir` is no readable run directory or the reference is of another recipe.
    """
    from orchestrator.verify import verify

    verdict, run = verify(rundir, reference, unfinished=unfinished)
    if run is None:
        raise ConfigurationError(verdict.checks[0].text)
    other = collect(reference) if reference else None
    if other and other.recipe.fingerprint() != run.recipe.fingerprint():
        raise ConfigurationError(
            f"--reference {other.uri}: its recipe is {other.recipe.fingerprint()[:12]}, this run's is {run.recipe.fingerprint()[:12]};"
            " only runs of one recipe can be compared"
        )
    return write_files(run, other, verdict, folder)


def write_files(run: RunHistory, reference: RunHistory | None, verdict: Verdict, folder: Path) -> Report:
    """Draw and write; reads nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = summary(run, verdict, reference)
    repeated, missed = figures["repeated_instances"], figures["missed_instances"]
    drawings: dict[str, tuple[plots.Picture, str]] = {
        "loss": (lambda theme: plots.loss_figure(run, reference, theme), "loss by step, with a mark at each start"),
        "timeline": (lambda theme: plots.timeline_figure(run, theme), "what each start spent its time on"),
        "coverage": (
            lambda theme: plots.coverage_figure(run, repeated, missed, theme),
            "which start each step is from, and which were computed again",
        ),
    }
    pictures, files = {}, []
    for name, (draw, alt) in drawings.items():
        pictures[name] = Pictures(plots.png(draw(LIGHT)), plots.png(draw(DARK)), alt)
        files.append(folder / f"{name}.png")
        files[-1].write_bytes(pictures[name].light)
    html = folder / "report.html"
    html.write_text(page(run, verdict, figures, pictures), encoding="utf-8")
    facts = folder / "summary.json"
    facts.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return Report(html=html, files=(html, *files, facts), summary=figures, verdict=verdict, run=run)
