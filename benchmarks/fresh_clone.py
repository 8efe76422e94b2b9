"""A new user's first minutes: clone the repository, `make demo`, with an empty model cache. Records main.demo_seconds.

    python benchmarks/fresh_clone.py --record
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from longstraw_agents import figures


def main() -> None:
    """Clone HEAD into an empty folder, run the demo there, and time all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write main.demo_seconds")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="longstraw-clone-"))
    try:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment["LONGSTRAW_CACHE"] = str(folder / "cache")
        started = time.perf_counter()
        subprocess.run(["git", "clone", "-q", str(figures.ROOT), str(folder / "clone")], check=True)
        subprocess.run(["make", "demo", "ARGS=--json demo.json"], cwd=folder / "clone", env=environment, check=True)
        seconds = time.perf_counter() - started
        report = json.loads((folder / "clone" / "demo.json").read_text())
    finally:
        shutil.rmtree(folder)
    inside, gain = round(report["seconds"]), round(report["gain_points"], 1)
    print(f"{seconds:.0f} s from clone to the demo's last line ({inside} s of it the demo); gain {gain} points")
    if arguments.record:
        figures.record("main.demo_seconds", round(seconds), "s", extra={"demo_alone": inside, "gain_points": gain})


if __name__ == "__main__":
    main()
