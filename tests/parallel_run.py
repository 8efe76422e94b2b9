"""`longstraw` with the environments of the tests registered, and a way to die: for trials of runs in several processes.

    python -m tests.parallel_run ARGUMENTS...

LONGSTRAW_TRIAL="RANK PHASE COUNT HOW" makes process RANK die (HOW "kill") or stop for good (HOW "hang") when it begins PHASE for
the COUNT-th time; phases are capture, replay, reverse, step, checkpoint and commit. It prints the time at which it does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import letters  # noqa: F401  registers tests/Letters-v0

from longstraw_agents.cli import main
from longstraw_agents.storage import Store
from longstraw_agents.trainer.optimizer import Stepper
from longstraw_agents.trainer.replay import TreeReplay
from longstraw_agents.trainer.update import Trainer

PHASES: dict[str, tuple[type, str]] = {
    "capture": (TreeReplay, "_capture"),
    "replay": (TreeReplay, "_replay_leaves"),
    "reverse": (TreeReplay, "_reverse"),
    "step": (Stepper, "step"),
    "checkpoint": (Trainer, "checkpoint"),
    "commit": (Store, "commit_step"),
}


def arm(rank: str, phase: str, number: str, how: str) -> None:
    """Make this process end as told, if it is the one."""
    if os.environ.get("RANK", "0") != rank:
        return
    owner, name = PHASES[phase]
    original: Callable[..., Any] = getattr(owner, name)
    calls = count(1)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == int(number):
            print(f"trial begins at {time.time()}", flush=True)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return original(*args, **kwargs)

    setattr(owner, name, dying)


if __name__ == "__main__":
    if "LONGSTRAW_TRIAL" in os.environ:
        arm(*os.environ["LONGSTRAW_TRIAL"].split())
    main()
