"""How long `longstraw --help` takes, in fresh processes: the median of ten. `python benchmarks/cli_help.py --record`."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from longstraw_agents import figures

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--record", action="store_true", help="write main.cli_help_seconds")
arguments = parser.parse_args()

seconds = []
for _ in range(10):
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "longstraw_agents.cli", "--help"], check=True, stdout=subprocess.DEVNULL)
    seconds.append(time.perf_counter() - started)
median = statistics.median(seconds)
print(f"longstraw --help: {median:.3f} s (median of {len(seconds)}; worst {max(seconds):.3f} s)")
if arguments.record:
    figures.record("main.cli_help_seconds", median, "s", trials=len(seconds), extra={"worst": round(max(seconds), 4)})
