"""A trainer that trains nothing: it does what the files of its folder say, so that tests can stage any ending.

`python fake_trainer.py FOLDER`: writes FOLDER/start-<restart>-<rank>.json (pid and environment), then obeys
FOLDER/<rank>: "exit N" once, the file is taken away. On SIGTERM: exit 75, or whatever FOLDER/on-term says
("exit N", "ignore", "slow SECONDS").
"""

import json
import os
import signal
import sys
import time


def main() -> None:
    folder = sys.argv[1]
    rank = os.environ["UNTILDONE_PROCESS_ID"]
    told = False

    def on_term(*_: object) -> None:
        nonlocal told
        told = True

    signal.signal(signal.SIGTERM, on_term)
    path = f"{folder}/start-{os.environ['UNTILDONE_RESTART_ATTEMPT']}-{rank}.json"
    with open(f"{path}.tmp", "w") as file:
        json.dump({"pid": os.getpid(), "env": dict(os.environ)}, file)
    os.rename(f"{path}.tmp", path)
    while True:
        order = take(f"{folder}/{rank}")
        if order:
            os._exit(int(order.split()[1]))
        if told:
            how = read(f"{folder}/on-term") or "exit 75"
            if how.startswith("exit"):
                os._exit(int(how.split()[1]))
            if how.startswith("slow"):
                time.sleep(float(how.split()[1]))
                os._exit(75)
        time.sleep(0.01)


def read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def take(path: str) -> str:
    order = read(path)
    if order:
        os.unlink(path)
    return order


main()
