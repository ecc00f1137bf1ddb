"""Colours of the pictures, for a light and a dark page. Okabe and Ito's set: readable with any colour vision."""

from dataclasses import dataclass

# Phases in the order in which a start goes through them; `queue` is the time before it, waiting for devices.
PHASES = ("queue", "Starting", "Restoring", "Compiling", "Training", "Evaluating", "Saving", "Exiting")

PHASE_COLOURS = {
    "queue": "#c9ced6",
    "Starting": "#94a0b2",
    "Restoring": "#56b4e9",
    "Compiling": "#e69f00",
    "Training": "#009e73",
    "Evaluating": "#cc79a7",
    "Saving": "#0072b2",
    "Exiting": "#d55e00",
}


@dataclass(frozen=True)
class Theme:
    """Everything in a picture that depends on the page behind it."""

    name: str
    background: str
    text: str
    muted: str
    grid: str
    reference: str
    run: str
    bad: str
    queue: str


LIGHT = Theme("light", "#ffffff", "#1b2230", "#5e6878", "#e6e9ee", "#a9c7ea", "#0b5cad", "#c0392b", "#d9dde3")
DARK = Theme("dark", "#161b24", "#e8ecf2", "#98a3b3", "#2a323e", "#3f628c", "#7cbcff", "#ff7b6b", "#3a4350")


def phase_colour(phase: str, theme: Theme) -> str:
    """Colour of a phase; one that is not known yet is drawn like queueing rather than left out."""
    return theme.queue if phase == "queue" else PHASE_COLOURS.get(phase, theme.queue)
