"""Start one command as several processes of a run on this machine, and name the one that ends it.

Idea: the processes find each other through the environment that torchrun uses as well (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT), so a command that runs here runs under torchrun on many machines. When one dies, the others can't go
on: they get a moment to say what they saw, and are stopped. The one to blame is the first that did not merely follow another.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from longstraw_agents.errors import ConfigError, RankError

#: Exit status of a process that stopped because another one was gone, and of one that was found to hang.
FOLLOWED, HUNG = 75, 70

_POLL = 0.05


def launch(command: Sequence[str], count: int, *, grace: float = 10.0, environment: Mapping[str, str] | None = None) -> None:
    """Run `command` as `count` processes and wait for all of them.

    grace: seconds that the others get to end by themselves after one has failed. Raises RankError, naming the process that
    failed and how; Ctrl-C stops all of them.
    """
    if count < 1:
        raise ConfigError(f"{count} processes were asked for; start at least 1")
    base = dict(os.environ, **(environment or {}), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    base.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    processes = [
        subprocess.Popen(command, env=dict(base, RANK=str(rank), LOCAL_RANK=str(rank)), start_new_session=False)
        for rank in range(count)
    ]
    try:
        codes = _wait(processes, grace)
    finally:
        _stop(processes)
    if any(codes):
        raise RankError(_verdict(codes))


def _wait(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> list[int | None]:
    """Exit statuses once all ended, or once `grace` is over after the first failure (None: still running then)."""
    deadline = None
    while True:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return codes
        if deadline is None and any(codes):
            deadline = time.monotonic() + grace
        if deadline is not None and time.monotonic() > deadline:
            return codes
        time.sleep(_POLL)


def _verdict(codes: Sequence[int | None]) -> str:
    failed = [(rank, code) for rank, code in enumerate(codes) if code]
    rank, code = next(((r, c) for r, c in failed if c < 0), next(((r, c) for r, c in failed if c != FOLLOWED), failed[0]))
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    how = {HUNG: "hung", FOLLOWED: "missed another one (see its message)"}.get(code, how)
    return (
        f"process {rank} of {len(codes)} {how}; the others were stopped. Nothing of the unfinished step was kept: run the same "
        "command again, with this or another number of processes, to go on from the last checkpoint"
    )


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + 5
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
