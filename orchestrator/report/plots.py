"""The three pictures: loss, timeline, coverage. Each is a pure function of RunHistory to a matplotlib Figure."""

import math
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from orchestrator.report.collect import RunHistory, StartHistory
from orchestrator.report.style import PHASE_COLOURS, PHASES, Theme, phase_colour

WIDTH = 10.0  # inches; at 150 dots per inch the page shows them at half size on a sharp screen
DPI = 150
MAX_ROWS = 40  # starts drawn one by one; a run with more shows the newest


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes, the same for the same records."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor=figure.get_facecolor(), metadata={"Software": ""})
    return buffer.getvalue()


def loss_figure(run: RunHistory, reference: RunHistory | None, theme: Theme) -> Figure:
    """Loss by step: reference thick and pale, the run on top, a mark at each start. Below: the difference, where there is one."""
    figure, axes = _figure(theme, (WIDTH, 5.2 if reference else 4.2), [3.2, 1.0] if reference else [1.0])
    main = axes[0]
    if reference and reference.curve:
        steps = sorted(reference.curve)
        label = "reference, never interrupted"
        main.plot(
            steps,
            [reference.curve[s].loss for s in steps],
            color=theme.reference,
            linewidth=7,
            label=label,
            solid_capstyle="round",
        )
    thrown_away = False
    for start in run.starts:
        lines = [line for line in start.lines if line.step > start.first_step]
        lost = [line for line in lines if line.step > _kept_until(run, start)]
        main.plot(
            [x.step for x in lost],
            [x.loss for x in lost],
            "x",
            color=theme.bad,
            markersize=6,
            markeredgewidth=1.6,
            zorder=5,
        )
        thrown_away = thrown_away or bool(lost)
    steps = sorted(run.curve)
    main.plot(
        steps,
        [run.curve[s].loss for s in steps],
        color=theme.run,
        linewidth=1.7,
        label="this run, as committed",
        zorder=4,
    )
    if thrown_away:
        main.plot(
            [],
            [],
            "x",
            color=theme.bad,
            markersize=6,
            markeredgewidth=1.6,
            label="computed, lost with its start, computed again",
        )
    if run.held_out:
        marked = sorted(run.held_out)
        main.plot(
            marked,
            [run.held_out[s] for s in marked],
            "D",
            color=PHASE_COLOURS["Evaluating"],
            markersize=6,
            label="held-out loss",
            zorder=6,
        )
    _mark_starts(axes, run, theme)
    main.set_ylabel("loss (nats per token)", color=theme.text)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, labelcolor=theme.text, fontsize=9)
    if reference:
        _difference(axes[1], run, reference, theme)
    axes[-1].set_xlabel("step (optimizer steps completed)", color=theme.text)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in axes:
        panel.set_xlim(0, max(run.target_step, max(run.curve, default=1)) + 0.5)
    return figure


def _difference(panel: Axes, run: RunHistory, reference: RunHistory, theme: Theme) -> None:
    steps = sorted(run.curve.keys() & reference.curve.keys())
    gaps = [abs(run.curve[s].loss - reference.curve[s].loss) for s in steps]
    floor = min((gap for gap in gaps if gap > 0), default=1e-6)
    top = max(max(gaps, default=0.0), floor)
    panel.plot(steps, gaps, color=theme.run, linewidth=1.2, marker=".", markersize=4)
    panel.set_yscale("symlog", linthresh=floor)
    panel.set_ylim(-floor * 0.4, top * 4)
    decades = range(math.ceil(math.log10(floor)), math.floor(math.log10(top)) + 1)
    ticks = [10.0**d for d in decades[:: max(1, len(decades) // 2)]] if top > floor else []
    panel.set_yticks([0.0, *ticks], ["0", *(f"$10^{{{round(math.log10(t))}}}$" for t in ticks)])
    panel.minorticks_off()
    panel.set_ylabel("|difference|", color=theme.text)
    exact = next((s for s, gap in zip(steps, gaps, strict=True) if gap > 0), None)
    last = (exact - 1) if exact else (steps[-1] if steps else 0)
    resize = run.first_resize_step
    changed = f"; the devices first changed at step {resize:,}" if resize is not None else ""
    panel.set_title(
        f"difference of the losses: exactly 0 through step {last:,}{changed}",
        loc="left",
        fontsize=8.5,
        color=theme.muted,
    )


def _mark_starts(axes: Sequence[Axes], run: RunHistory, theme: Theme) -> None:
    """A thin line at the step where each start began; labels that would touch are stacked."""
    top = axes[0]
    low, high = top.get_ylim()
    top.set_ylim(low, high + (high - low) * 0.20)
    letter = max(run.target_step, 1) * 0.0085  # width of a letter, in steps
    edges = [-math.inf] * 4  # where the labels of each line end
    places: dict[int, list[StartHistory]] = {}
    for start in run.starts:
        places.setdefault(start.first_step, []).append(start)
    for x, starts in sorted(places.items()):
        for panel in axes:
            panel.axvline(x, color=theme.muted, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
        level = next((i for i, edge in enumerate(edges) if edge < x), 0)
        edges[level] = x + letter * (len(_names(starts)) + 2)
        top.annotate(
            _names(starts),
            (x, 0.975 - 0.062 * level),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            color=theme.text,
            fontsize=8,
            va="top",
            bbox={"facecolor": theme.background, "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
            zorder=6,
        )


def _names(starts: Sequence[StartHistory]) -> str:
    """1.3, 1.4 · cpu-8; 2.1 · cpu-2: starts that began at one step, together where their devices are the same."""
    groups: list[tuple[str, list[str]]] = []
    for start in starts:
        kind = start.record.plan.device_type
        if not groups or groups[-1][0] != kind:
            groups.append((kind, []))
        groups[-1][1].append(start.name)
    return "; ".join(f"{', '.join(names)} · {kind}" for kind, names in groups)


def _kept_until(run: RunHistory, start: StartHistory) -> int:
    """Last step of `start` that is part of the committed lineage; its first step when none is."""
    key = (start.record.attempt, start.record.start)
    return max((c.ref.step for c in run.lineage if (c.ref.attempt, c.ref.start) == key), default=start.first_step)


def timeline_figure(run: RunHistory, theme: Theme) -> Figure:
    """One row per start, coloured by phase, with its commits as ticks and its ending in words."""
    starts = run.starts[-MAX_ROWS:]
    figure, (panel,) = _figure(theme, (WIDTH, 1.35 + 0.42 * max(len(starts), 1)), [1.0])
    origin, seen = run.began, set[str]()
    unit, divisor = _time_unit(run.seconds)
    for row, start in enumerate(starts):
        x = (start.began - origin) / divisor
        for phase, left, width in segments(start):
            seen.add(phase)
            begin = x + left / divisor
            panel.barh(row, width / divisor, left=begin, height=0.62, color=phase_colour(phase, theme), linewidth=0)
        for commit in start.commits:
            panel.plot(
                [(commit.time - origin) / divisor] * 2, [row - 0.31, row + 0.31], color=theme.text, linewidth=1.1
            )
        _say_ending(panel, row, start, (x, divisor, origin), run, theme)
    panel.set_yticks(range(len(starts)), [f"{s.name}  {s.record.plan.device_type}" for s in starts], color=theme.text)
    panel.set_ylim(len(starts) - 0.4, -0.6)
    panel.set_xlim(0, max(run.seconds / divisor, 1e-9) * 1.02)
    panel.set_xlabel(f"{unit} since the run was asked for", color=theme.text)
    panel.grid(axis="y", visible=False)
    handles: list[Any] = [Patch(color=phase_colour(p, theme), label=p) for p in PHASES if p in seen]
    handles.append(panel.plot([], [], color=theme.text, linewidth=1.1, label="commit")[0])
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=9,
        frameon=False,
        labelcolor=theme.text,
        fontsize=8.5,
        handlelength=1.2,
        columnspacing=1.2,
    )
    return figure


def segments(start: StartHistory) -> list[tuple[str, float, float]]:
    """(phase, left, width) in seconds from the start's beginning: queue ends at 0, phases follow in their natural order.

    A start reports totals per phase. They are stacked in the order in which a start first meets them; commits are drawn at their true times.
    """
    seconds = start.phase_seconds
    queue = seconds.get("queue", 0.0)
    found = [("queue", -queue, queue)] if queue > 0 else []
    left = 0.0
    for phase in [*PHASES[1:], *(p for p in seconds if p not in PHASES)]:
        width = seconds.get(phase, 0.0)
        if width > 0 and phase != "Done":
            found.append((phase, left, width))
            left += width
    return found


def _say_ending(
    panel: Axes, row: int, start: StartHistory, clock: tuple[float, float, float], run: RunHistory, theme: Theme
) -> None:
    x, divisor, origin = clock
    right = x + sum(width for phase, _, width in segments(start) if phase != "queue") / divisor
    if start.ended is not None:
        right = max(right, (start.ended - origin) / divisor)
    cause = start.ending.cause if start.ending else ("done" if run.done and start is run.starts[-1] else "alive")
    good = cause in ("completed", "plan-change", "done", "alive")  # nothing went wrong
    text = f"{'' if good else '✕ '}{cause} · step {start.first_step}→{start.last_step}"
    late = right > 0.70 * run.seconds / divisor
    left_edge = x - start.phase_seconds.get("queue", 0.0) / divisor
    panel.annotate(text, (left_edge if late else right, row), xytext=(-6 if late else 6, 0), textcoords="offset points", va="center",
                   ha="right" if late else "left", color=theme.text if good else theme.bad, fontsize=8.5)  # fmt: skip


def _time_unit(seconds: float) -> tuple[str, float]:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds > 3 * size:
            return unit, size
    return "seconds", 1.0


STARTS = ("#0b5cad", "#b86e00", "#00795a", "#a8547f", "#2f7fb3", "#b8480a", "#6a58b8", "#5c6b7f")


def coverage_figure(run: RunHistory, repeated: int | None, missed: int | None, theme: Theme) -> Figure:
    """Which start each committed step is from, and below it the steps that were computed and thrown away."""
    lost = [(s, _kept_until(run, s)) for s in run.starts if s.last_step > _kept_until(run, s)]
    lanes = _lanes([(kept, start.last_step) for start, kept in lost])
    rows = 1 + (max(lanes, default=-1) + 1)
    figure, (panel,) = _figure(theme, (WIDTH, 1.45 + 0.33 * rows), [1.0])
    colours = {start.name: STARTS[index % len(STARTS)] for index, start in enumerate(run.starts)}

    def bar(row: int, first: int, last: int, start: StartHistory, alpha: float) -> None:
        panel.barh(row, last - first, left=first, height=0.7, color=colours[start.name], alpha=alpha, edgecolor=theme.background, linewidth=1.2)  # fmt: skip
        panel.text(
            (first + last) / 2, row, start.name, ha="center", va="center", color="white", fontsize=8, fontweight="bold"
        )

    for start in run.starts:
        if _kept_until(run, start) > start.first_step:
            bar(0, start.first_step, _kept_until(run, start), start, 1.0)
    for (start, kept), lane in zip(lost, lanes, strict=True):
        bar(1 + lane, kept, start.last_step, start, 0.62)
    panel.set_yticks(
        [0, *([1] if lost else [])], ["committed", *(["lost, done again"] if lost else [])], color=theme.text
    )
    panel.set_ylim(rows - 0.45, -0.55)
    panel.set_xlim(0, max(run.target_step, 1))
    panel.set_xlabel("step", color=theme.text)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(axis="y", visible=False)
    size, steps = run.recipe.global_batch, run.committed_step
    counts = (
        f"repeated {repeated:,} · missed {missed:,}" if repeated is not None and missed is not None else "not audited"
    )
    panel.set_title(
        f"{steps:,} steps × {size:,} = {steps * size:,} instances read · {counts}",
        color=theme.text,
        fontsize=10,
        loc="left",
    )
    return figure


def _lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """A row for each span, the first in which it touches no other."""
    ends: list[int] = []
    chosen = []
    for first, last in spans:
        lane = next((i for i, end in enumerate(ends) if end <= first), len(ends))
        if lane == len(ends):
            ends.append(last)
        ends[lane] = last
        chosen.append(lane)
    return chosen


def _figure(theme: Theme, size: tuple[float, float], ratios: Sequence[float]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained", facecolor=theme.background)
    grid = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": list(ratios)})
    axes: list[Axes] = [row[0] for row in grid]
    for panel in axes:
        panel.set_facecolor(theme.background)
        panel.grid(color=theme.grid, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.tick_params(colors=theme.muted, labelsize=9, length=0)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
        panel.spines["bottom"].set_color(theme.grid)
    return figure, axes


Picture = Callable[[Theme], Figure]
