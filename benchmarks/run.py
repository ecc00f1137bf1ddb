"""All benchmarks that need no peer, one after the other; each prints one JSON object, which is kept in bench-out/."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = ("step_time", "reduction", "loader", "restart_latency", "start_up")


def main() -> None:
    out = HERE.parent / "bench-out"
    out.mkdir(exist_ok=True)
    for name in BENCHMARKS:
        print(f"{name} …", file=sys.stderr)
        done = subprocess.run([sys.executable, str(HERE / f"{name}.py")], stdout=subprocess.PIPE, text=True, check=True)
        (out / f"{name}.json").write_text(done.stdout)
        print(done.stdout, end="")


if __name__ == "__main__":
    main()
