"""The supervisor: one command and all that it starts, held to limits, and ended with nothing left.

Idea: the kernel bounds a single process (rlimits); sums over processes, and what no process owns, are counted here and the whole
command is ended at the first limit it passes. What can't be counted counts as too much.

Vocabulary
    stopped   the limit that ended a command: "time", "memory", "processes", "disk" or "output"; None where it ended itself
    held      what processes hold without its being resident or in the folder: buffers of sockets and pipes, deleted files
"""

from __future__ import annotations

import errno
import math
import os
import selectors
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longstraw_agents.errors import ConfigError

_POLL_SECONDS = 0.02
_SLOW_POLL_SECONDS = 0.1  # of what takes a walk to count; at most a fifth of the time is spent on it
_SOCKET_BYTES, _PIPE_BYTES = 212_992, 65_536  # what the buffer of one may take (net.core.wmem_default; pipe(7))
_SETTLING_BYTES = 2**20  # blocks of a file still change a little while the kernel writes it out
_DEEPEST = 128  # folders within folders that are looked into
_SPARE_PROCESSES = 4  # bubblewrap's own


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of one command and all that it starts. Sizes in MB (2**20 bytes); `output_bytes` are kept, 16 times as many read."""

    seconds: float = 10.0
    memory_mb: int = 512
    processes: int = 64
    disk_mb: int = 64
    files: int = 10_000
    output_bytes: int = 65_536

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"sandbox limit {name} is {value}; give a number above 0")


@dataclass(frozen=True)
class Completed:
    """What a command came to: stdout and stderr together, its exit status (negative: the signal), and what stopped it."""

    output: str
    status: int
    stopped: str | None
    seconds: float


def supervise(
    command: Sequence[str],
    stdin: bytes,
    environment: Mapping[str, str],
    config: SandboxConfig,
    folder: Path,
    *,
    before: tuple[float, int],
    cwd: Path | None,
    descriptors: tuple[int, ...] = (),
) -> Completed:
    """Run to the end or to the first limit; afterwards nothing that was started is left.

    before: what `disk` said of the folder, which may be over its limit already but must not grow then. With `descriptors` (kept
    open for the command) it is bubblewrap, with which everything inside ends.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile() as source:
        source.write(stdin)
        source.seek(0)
        process = subprocess.Popen(
            command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=cwd, env=dict(environment),
            pass_fds=descriptors, start_new_session=True,
        )  # fmt: skip
    try:
        output, stopped = _Watch(process, config, folder, before, started).run()
    finally:
        members = descendants(process.pid)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            members = []  # it ended by itself, and bubblewrap took the rest with it
        if not descriptors:
            _kill(members)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    return Completed(output.decode("utf-8", "replace"), process.returncode, stopped, time.monotonic() - started)


@dataclass
class _Watch:
    process: subprocess.Popen[bytes]
    config: SandboxConfig
    folder: Path
    before: tuple[float, int]
    started: float

    def run(self) -> tuple[bytes, str | None]:
        """The output that is kept, and the limit that was passed."""
        kept, read, slow = bytearray(), 0, self.started + _POLL_SECONDS
        stdout, most = self.process.stdout, self.config.output_bytes
        assert stdout is not None
        os.set_blocking(stdout.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            is_open = True
            while True:
                if is_open and selector.select(_POLL_SECONDS):
                    data = stdout.read(65_536)
                    is_open = data != b""
                    read += len(data or b"")
                    kept += (data or b"")[: most - len(kept)]
                elif not is_open:
                    time.sleep(_POLL_SECONDS)
                ended = self.process.poll() is not None and not (is_open and selector.select(0))
                if ended:
                    return bytes(kept), "disk" if self._disk_passed(0) else None
                now = time.monotonic()
                stopped = "time" if now - self.started > self.config.seconds else None
                stopped = stopped or ("output" if read > 16 * most else None) or self._passed(slow <= now)
                if stopped:
                    return bytes(kept), stopped
                if slow <= now:
                    slow = time.monotonic() + max(_SLOW_POLL_SECONDS, 4 * (time.monotonic() - now))

    def _passed(self, slowly: bool) -> str | None:
        """The limit on processes, memory or disk that is passed; `slowly` counts what takes longer to count too."""
        members = descendants(self.process.pid)
        if len(members) > self.config.processes + _SPARE_PROCESSES:
            return "processes"
        memory = resident(members)
        if slowly:
            buffers, deleted = held(members, self.folder)
            memory += buffers
            if self._disk_passed(deleted):
                return "disk"
        return "memory" if memory > self.config.memory_mb * 2**20 else None

    def _disk_passed(self, deleted: int) -> bool:
        size, files = disk(self.folder, max(self.config.files, self.before[1]))
        size += deleted
        if math.isinf(size):
            return True
        return (size > self.config.disk_mb * 2**20 and size > self.before[0] + _SETTLING_BYTES) or (
            files > self.config.files and files > self.before[1]
        )


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, and itself, as the kernel lists them."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        try:
            for thread in os.listdir(f"/proc/{current}/task"):
                queue += [int(child) for child in Path(f"/proc/{current}/task/{thread}/children").read_text().split()]
        except OSError:
            continue  # it has ended meanwhile
    return found


def resident(members: Sequence[int]) -> int:
    """Bytes that processes have in memory, shared ones counted for each."""
    page, total = os.sysconf("SC_PAGE_SIZE"), 0
    for member in members:
        try:
            total += int(Path(f"/proc/{member}/statm").read_bytes().split()[1]) * page
        except (OSError, IndexError):
            continue  # it has ended meanwhile
    return total


def held(members: Sequence[int], folder: Path) -> tuple[int, int]:
    """Bytes that sockets and pipes of processes may buffer, and bytes of files of the folder's disk deleted but still open."""
    device = folder.stat().st_dev
    buffers: dict[str, int] = {}
    deleted: dict[int, int] = {}
    for member in members:
        try:
            for name in os.listdir(f"/proc/{member}/fd"):
                link = os.readlink(f"/proc/{member}/fd/{name}")
                if link.startswith(("socket:", "pipe:")):
                    buffers[link] = _SOCKET_BYTES if link.startswith("socket:") else _PIPE_BYTES
                elif link.endswith("(deleted)"):
                    seen = os.stat(f"/proc/{member}/fd/{name}")
                    if seen.st_dev == device and stat.S_ISREG(seen.st_mode):
                        deleted[seen.st_ino] = seen.st_blocks * 512
            _mapped(member, device, deleted)
        except OSError:
            continue  # it has ended meanwhile, or closed it
    return sum(buffers.values()), sum(deleted.values())


def _mapped(member: int, device: int, deleted: dict[int, int]) -> None:
    """Adds deleted files that a process holds by a mapping alone; what of them is on disk is at most what is mapped."""
    disk_number = f"{os.major(device):02x}:{os.minor(device):02x}"
    mapped: dict[int, int] = {}
    with open(f"/proc/{member}/maps", errors="replace") as lines:
        for line in lines:
            if line.endswith("(deleted)\n"):
                span, _, _, where, inode, *_ = line.split()
                if where == disk_number:
                    first, last = (int(end, 16) for end in span.split("-"))
                    mapped[int(inode)] = mapped.get(int(inode), 0) + last - first
    for number_of_file, size in mapped.items():
        deleted.setdefault(number_of_file, size)


def disk(folder: Path, most: float = math.inf) -> tuple[float, int]:
    """Bytes on disk and number of entries below a folder, counted up to `most` entries.

    Infinitely many bytes where a part can't be looked into, or lies so deep that looking would take long. Links are not
    followed, also where a folder is replaced by one while we look.
    """
    size: float = 0
    count, top = 0, os.path.realpath(folder)
    queue = [top]
    while queue and count <= most:
        path = queue.pop()
        if path.count("/") > top.count("/") + _DEEPEST:
            return math.inf, count
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM):
                return math.inf, count  # shut: what it holds can't be counted
            continue  # removed while we looked
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}") != path:
                continue  # moved, or a folder above it became a link
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(f"{path}/{entry.name}")
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue  # removed while we looked
        finally:
            os.close(descriptor)
    return size, count


def _kill(members: Sequence[int]) -> None:
    # without a sandbox: what has left the process group, as far as it could still be seen
    for member in members:
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            continue
