"""Durations in documents: "300s", "5m", "1h30m", "2d", or a number of seconds. In code they are seconds."""

import re
from typing import Annotated

from pydantic import BeforeValidator

LONGEST_SECONDS = 10 * 365 * 86400.0  # what is longer is a slip of the pen, and no timer takes it
FORMS = '"300s", "5m", "1h30m", or a number of seconds'
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
PATTERN = "".join(f"(?:([0-9]+(?:[.][0-9]+)?){unit})?" for unit in UNITS)  # matches an empty text as well

_DURATION = re.compile(PATTERN)


def parse_duration(value: object) -> float:
    """Seconds of "300s", "5m", "1h30m", "2d", or of a number. Raises ValueError with the accepted forms."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) and value.strip() else None
        if match is None:
            raise ValueError(f"not a duration; write it as {FORMS}")
        seconds = sum(float(part or 0) * unit for part, unit in zip(match.groups(), UNITS.values(), strict=True))
    if not 0 <= seconds <= LONGEST_SECONDS:
        raise ValueError("a duration is between 0 and ten years")
    return seconds


def about(seconds: float) -> str:
    """As people write it, to two units: 4s, 2m05s, 3h12m, 2d04h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_duration(seconds: float) -> str:
    """The shortest exact form of whole seconds: 5400 → "1h30m", 21600 → "6h"; parse_duration reads it back."""
    rest, parts = round(seconds), []
    for unit, size in UNITS.items():
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


Duration = Annotated[float, BeforeValidator(parse_duration, json_schema_input_type=str | float)]
