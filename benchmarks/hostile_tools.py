"""Tools that do what a tool must not: hang, fork, fill memory and disk, flood output, die. Used by benchmarks/environments.py."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time

from longstraw_agents.envs import ToolLimits, tool

BOUND = ToolLimits(seconds=3.0, output_chars=2_000, memory_mb=128)
SHORT = ToolLimits(seconds=0.5, output_chars=2_000)


@tool(isolated=True, limits=BOUND)
def hang_deaf() -> str:
    """Ignore every signal that can be ignored, and never return."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(0.01)


@tool(isolated=True, limits=BOUND)
def fork_on() -> str:
    """Fork until it fails, then go on."""
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)


@tool(isolated=True, limits=BOUND)
def leave_behind() -> str:
    """Leave a process in a session of its own behind and return."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    return "left"


@tool(isolated=True, limits=BOUND)
def fill_memory() -> str:
    """Take memory without end."""
    taken = []
    while True:
        taken.append(bytearray(1_000_000))


@tool(isolated=True, limits=BOUND)
def fill_disk() -> str:
    """Write without end wherever that is allowed."""
    number = 0
    while True:
        for folder in (".", "/tmp", "/dev/shm"):
            try:
                with open(f"{folder}/{number}", "wb") as file:
                    file.write(b"x" * 10_000_000)
            except OSError:
                continue
        number += 1


@tool(isolated=True, limits=BOUND)
def hide() -> str:
    """Hold disk and memory that no walk and no process shows: deleted files, folders without end, buffers of sockets."""
    held = []
    while True:
        try:
            held += socket.socketpair()
            held[-1].setblocking(False)
            held[-1].send(b"x" * 200_000)
            held.append(open("gone", "wb"))
            os.unlink("gone")
            held[-1].write(b"x" * 3_000_000)
            os.mkdir("d")
            os.chdir("d")
        except OSError:
            time.sleep(0.01)


@tool(isolated=True, limits=BOUND)
def flood() -> str:
    """Return and print a great deal."""
    sys.stdout.write("x" * 1_000_000)
    os.write(1, b"y" * 1_000_000)
    return "z" * 50_000_000


@tool(isolated=True, limits=BOUND)
def die() -> str:
    """Kill the process from within."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return "?"


@tool(limits=SHORT)
def hang_here() -> str:
    """Never return, in the environment's own process."""
    while True:
        try:
            time.sleep(0.001)
        except Exception:
            continue


@tool(limits=SHORT)
async def hang_async() -> str:
    """Never return, in the loop of async tools."""
    await asyncio.sleep(3600)
    return "?"


@tool(limits=SHORT)
def flood_here() -> str:
    """Return ten megabytes."""
    return "\ud800" * 10_000_000


@tool(limits=SHORT)
def leave() -> str:
    """Try to end the whole program."""
    raise SystemExit(1)


@tool(limits=SHORT)
def nest() -> list:
    """Return a list nested beyond every limit."""
    value: list = []
    for _ in range(100_000):
        value = [value]
    return value


class Mute:
    """Never says what it is."""

    def __str__(self) -> str:
        while self:
            time.sleep(0.001)
        return ""


class Unspeakable(Exception):
    """Can't say what went wrong."""

    def __str__(self) -> str:
        raise ValueError("no")


@tool(limits=SHORT)
def mute() -> list:
    """Return what can't be made a text of."""
    return [Mute()]


@tool(limits=SHORT)
def fail_darkly() -> str:
    """Raise an error without a message."""
    raise Unspeakable


@tool(limits=SHORT)
def name_badly() -> dict:
    """Return a mapping that is no JSON."""
    return {("a", 1): float("nan"), b"\xff": "\ud800"}


TOOLS = (
    hang_deaf, fork_on, leave_behind, fill_memory, fill_disk, hide, flood, die, hang_here, hang_async, flood_here, leave, nest,
    mute, fail_darkly, name_badly,
)  # fmt: skip
