"""The trainer at a pace at which a control plane can follow (`python -m tests.support.paced_trainer train`).

A toy step takes milliseconds: while a host is replaced, thousands would be trained, at the cost of the cores that the
control plane needs. So each waits for its batch, and does otherwise what it always does.
"""

import os
import sys
import time
from typing import Any

from trainer.cli import main
from trainer.data.loader import Loader

PACE = "PACE_SECONDS"  # variable of the container
PACE_SECONDS = 0.5  # without it
COMMAND = ("python", "-m", "tests.support.paced_trainer", "train")

if __name__ == "__main__":
    at_once, pause = Loader.__next__, float(os.environ.get(PACE, PACE_SECONDS))

    def paced(loader: Loader) -> tuple[int, dict[str, Any]]:
        time.sleep(pause)
        return at_once(loader)

    Loader.__next__ = paced  # type: ignore[method-assign]
    main(time.monotonic(), sys.argv[1:])
