"""Where the answers go: one JSON file per subject, with the versions that gave them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olmo_core.version import VERSION

HERE = Path(__file__).parent


def write_json(name: str, body: Any) -> None:
    made_with = {"ai2-olmo-core": VERSION, "torch": torch.__version__, "numpy": np.__version__}
    text = json.dumps({"made_with": made_with, **body}, separators=(",", ":"), sort_keys=True)
    (HERE / f"olmo_core_{name}.json").write_text(text + "\n")
