"""The overlay as a picture: both curves above, their difference below."""

from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import ConfigurationError
from trainer.metrics.overlay import Overlay

OURS, REFERENCE, BAD = "#0b5cad", "#e69f00", "#c0392b"  # Okabe and Ito: readable with any colour vision
SUFFIXES = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Before anything is read. Raises ConfigurationError for a form nobody draws, or where matplotlib is not installed."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(f"--plot {path}: name a file that ends in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigurationError("--plot draws with matplotlib; install it: pip install 'untildone[report]'") from None


def draw(o: Overlay, path: Path, metric: str, labels: tuple[str, str], tolerance: float | None) -> None:
    """Write the picture; `labels` name ours and the reference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for values, colour, label in ((o.reference, REFERENCE, labels[1]), (o.ours, OURS, labels[0])):
        above.plot(o.steps, values, color=colour, alpha=0.25, linewidth=0.6)
        above.plot(o.steps, _smooth(o, values), color=colour, linewidth=1.4, label=label)
    above.set_ylabel(metric)
    above.legend(frameon=False)
    below.plot(o.steps, o.ours - o.reference, color=OURS, alpha=0.2, linewidth=0.6)
    below.plot(o.steps, o.smooth, color=OURS, linewidth=1.4, label=f"mean over {o.window:,} steps")
    below.axhline(0, color="#5e6878", linewidth=0.8)
    if tolerance is not None:
        below.axhspan(-tolerance, tolerance, color="#009e73", alpha=0.12, linewidth=0, label=f"± {tolerance:g}")
        left = o.leaves(tolerance)
        if left is not None:
            below.axvline(left, color=BAD, linewidth=1, linestyle="--", label=f"left at step {left:,}")
    reach = 1.5 * max(abs(o.largest[0]), tolerance or 0.0) or 1.0
    below.set_ylim(-reach, reach)
    below.set_ylabel("ours - reference")
    below.set_xlabel("step")
    below.legend(frameon=False, fontsize="small")
    for axes in (above, below):
        _plain(axes)
    figure.savefig(path, dpi=150)


def _smooth(o: Overlay, values: Any) -> Any:
    """As the difference is: means over the window that ends at each step."""
    begin = np.searchsorted(o.steps, o.steps - o.window, side="right")
    sums, end = np.concatenate(([0.0], np.cumsum(values))), np.arange(1, o.steps.size + 1)
    return (sums[end] - sums[begin]) / (end - begin)


def _plain(axes: Any) -> None:
    axes.grid(color="#e6e9ee", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
