"""Twenty training steps of ours against twenty of conventional training: `python benchmarks/trace.py --record`.

Lifted float64, LoRA with the default loss (grpo with its mismatch weight), AdamW with clipping; a plain loop with torch's own
optimizer is the other side. The figure is the largest difference of a step's loss over the architectures named.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longstraw_agents import figures
from longstraw_agents.trainer.lifting import lifted
from longstraw_agents.trainer.loss import LossConfig
from tests import traces

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--only", default="llama,gemma3,qwen3_5_moe,glm_moe_dsa", help="architectures, with commas between")
parser.add_argument("--record", action="store_true", help="write exact.trace20_loss_difference")
arguments = parser.parse_args()

found: dict[str, float] = {}
for name in arguments.only.split(","):
    data = traces.groups(20)
    with lifted():
        pairs = list(zip(traces.ours(name, data, LossConfig()), traces.theirs(name, data, LossConfig()), strict=True))
    found[name] = max(abs(a - b) for a, b in pairs)
    print(f"{name}: losses {pairs[0][1]:.4f} to {pairs[-1][1]:.4f}, largest difference {found[name]:.2e}", flush=True)
if arguments.record:
    figures.record("exact.trace20_loss_difference", max(found.values()), "nats", trials=20, extra={"by_architecture": found})
