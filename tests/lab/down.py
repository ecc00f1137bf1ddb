"""Stops a lab, or all labs of this user whoever started them.

python -m tests.lab.down [--folder DIR | --all | --list]
"""

import argparse
import sys
from pathlib import Path

from tests.lab.lab import labs, stop_folder
from tests.lab.up import default_folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.down", description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--folder", type=Path, default=default_folder(), help="the lab's own folder")
    which.add_argument("--all", action="store_true", help="every lab of this user that has processes")
    which.add_argument("--list", action="store_true", help="only say which there are")
    options = parser.parse_args()
    if options.list:
        for folder, count in labs().items():
            gone = "" if folder.exists() else " (its folder is gone)"
            print(f"{folder}: {count} processes{gone}")
        return 0
    for folder in list(labs()) if options.all else [options.folder]:
        print(f"{folder}: {stop_folder(folder)} processes stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
