"""Starts a lab and leaves it running. Prints the line that points kubectl at it.

python -m tests.lab.up [--folder DIR] [--pool tpu7x-2x2x2=2 ...]
"""

import argparse
import os
import sys
import time
from pathlib import Path

from tests.lab.lab import Lab, LabError

POOLS = {"tpu7x-2x2x2": 2, "v5p-2x2x2": 1}


def default_folder() -> Path:
    """Where `up` and `down` work unless told otherwise."""
    base = Path(os.environ.get("UNTILDONE_CACHE") or Path.home() / ".cache" / "untildone")
    return base / "labs" / "default"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.up", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=default_folder(), help="the lab's own folder")
    parser.add_argument(
        "--pool", action="append", default=[], metavar="TYPE=SLICES", help=f"TPU nodes, default {POOLS}"
    )
    options = parser.parse_args()
    pools = {name: int(slices or 1) for name, _, slices in (p.partition("=") for p in options.pool)} or POOLS
    began = time.monotonic()
    try:
        lab = Lab.start(options.folder, pools)
    except (LabError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"lab up in {time.monotonic() - began:.1f} s", file=sys.stderr)
    for name, value in lab.environment.items():
        print(f"export {name}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
