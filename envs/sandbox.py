"""The sandbox: commands of an agent run in namespaces of their own, under a system-call filter and limits.

Idea: bubblewrap gives a process an empty root with the system's programs read-only, its own process list, no network, and one
folder that it may change. A filter (see `seccomp`) closes the kernel's other doors, rlimits bind each process, and a
supervisor here binds them all together: time, memory, number of processes, disk, output. Killing bubblewrap kills everything
inside. Without bubblewrap nothing runs, unless the user has asked for that with `--unsafe-no-sandbox`.

Vocabulary
    folder    the host folder that is /agent inside, the only place whose changes last
    stopped   the limit that ended a command: "time", "memory", "processes", "disk" or "output"; None where it ended itself
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import random
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from longstraw_agents.envs.seccomp import program
from longstraw_agents.errors import ConfigError, SandboxError

#: Set to 1 (the command line's `--unsafe-no-sandbox` does) to run commands without a sandbox where there is none.
UNSAFE_VARIABLE = "LONGSTRAW_UNSAFE_NO_SANDBOX"

_POLL_SECONDS = 0.02
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_INSIDE = {"PATH": "/usr/bin:/bin", "HOME": "/agent", "LANG": "C.UTF-8", "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}


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


@dataclass
class Sandbox:
    """Runs commands with `folder` as /agent. One per episode: commands of one sandbox run as one user id of their own."""

    folder: Path
    config: SandboxConfig = field(default_factory=SandboxConfig)
    _uid: int = field(default_factory=lambda: random.SystemRandom().randrange(61184, 65520))  # the range of passing users

    def own(self) -> None:
        """Give all files in the folder to the sandbox's user; call it after writing files from outside."""
        if os.geteuid() != 0:
            return
        self.folder.chmod(0o711)  # bubblewrap enters it after giving up root's right to ignore permissions
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, self._uid, self._uid, follow_symlinks=False)

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        readable: Sequence[Path] = (),
        variables: Mapping[str, str] | None = None,
        write: bool = True,
    ) -> Completed:
        """Run a command in /agent. `readable`: host paths shown read-only at the same place; `write=False`: /agent too.

        Raises SandboxError where the sandbox is missing or can't be built; a command's own failure is in its result.
        """
        environment = {**_INSIDE, **(variables or {})}
        unsafe = not available()
        if unsafe:
            require()
            environment["HOME"] = str(self.folder)
            full = [*_limits(self.config), *command]
            return _supervise(full, stdin, environment, self.config, self.folder, cwd=self.folder)
        _adopt_orphans()
        with tempfile.TemporaryFile() as filter_file, tempfile.TemporaryFile() as told:
            filter_file.write(program())
            filter_file.seek(0)
            descriptors = (filter_file.fileno(), told.fileno())
            box = self._bubblewrap(descriptors, readable, environment, write)
            full = [*_first_to_go(), *box, *_limits(self.config), *command]
            try:
                done = _supervise(full, stdin, {}, self.config, self.folder, cwd=None, descriptors=descriptors)
            finally:
                _bury(told)
        if done.status == 1 and done.output.startswith("bwrap: "):
            raise SandboxError(f"bubblewrap could not build the sandbox: {done.output.strip()[:300]}")
        return done

    def _bubblewrap(
        self, descriptors: tuple[int, int], readable: Sequence[Path], variables: Mapping[str, str], write: bool
    ) -> list[str]:
        size = str(self.config.disk_mb * 2**20)
        command = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        command += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
        if os.geteuid() != 0:
            command += ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
        else:  # a real user id of its own, so that the limit on processes binds (root would be exempt)
            command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        for name, value in variables.items():
            command += ["--setenv", name, value]
        command += ["--ro-bind", "/usr", "/usr"]
        for link in ("bin", "sbin", "lib", "lib64"):
            path = Path("/", link)
            if path.is_symlink():
                command += ["--symlink", f"usr/{link}", str(path)]
            elif path.is_dir():
                command += ["--ro-bind", str(path), str(path)]
        command += ["--dir", "/etc", "--proc", "/proc", "--dev", "/dev", "--size", "1048576", "--tmpfs", "/dev/shm"]
        command += ["--size", size, "--perms", "1777", "--tmpfs", "/tmp"]
        for parent in sorted({parent for path in readable for parent in path.parents if parent != Path("/")}):
            command += ["--perms", "0755", "--dir", str(parent)]  # bubblewrap would make them for root alone
        for path in readable:
            command += ["--ro-bind", str(path), str(path)]
        command += ["--bind" if write else "--ro-bind", str(self.folder), "/agent", "--chdir", "/agent"]
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", str(descriptors[0])]
        command += ["--info-fd", str(descriptors[1]), "--"]
        if os.geteuid() == 0:
            user = str(self._uid)
            command += ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
            command += ["--bounding-set=-all", "--inh-caps=-all", "--"]
        return command


@functools.cache
def available() -> bool:
    """Whether bubblewrap is installed and can build a sandbox here (tried once)."""
    if shutil.which("bwrap") is None or shutil.which("prlimit", path="/usr/bin") is None:
        return False
    trial = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "/usr/bin/true"]
    return subprocess.run(trial, capture_output=True, timeout=20, check=False).returncode == 0


def require() -> None:
    """Raise SandboxError where there is no sandbox and the user has not allowed to go without."""
    if not available() and os.environ.get(UNSAFE_VARIABLE) != "1":
        raise SandboxError(
            "this environment runs commands in a bubblewrap sandbox, and that is missing or does not work here. Install it "
            "(Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap), or pass --unsafe-no-sandbox to run "
            "them with your own rights (see docs/environments/sandbox.md)"
        )


@functools.cache
def _adopt_orphans() -> None:
    # bubblewrap may end before the first process inside it does. That orphan would go to process 1, which in a container often
    # never collects: a dead process would stay for each command. As their adoptive parent we collect them ourselves.
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise SandboxError(f"prctl(PR_SET_CHILD_SUBREAPER) failed: {os.strerror(ctypes.get_errno())}")


def _bury(told: IO[bytes]) -> None:
    """End and collect the first process of a sandbox, whose id bubblewrap has written down."""
    told.seek(0)
    written = told.read()
    if not written:
        return  # it failed before it made one
    first = json.loads(written)["child-pid"]
    try:
        if os.waitpid(first, os.WNOHANG) == (0, 0):
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
    except ChildProcessError:
        return  # bubblewrap has collected it


def _first_to_go() -> list[str]:
    # where memory runs out, the kernel ends what is in the sandbox before it ends training; set before rights are given up
    chosen = shutil.which("choom", path="/usr/bin")
    return [chosen, "-n", "500", "--"] if chosen else []


def _limits(config: SandboxConfig) -> list[str]:
    memory = (config.memory_mb + 64) * 2**20  # address space; the supervisor counts what is resident
    return [
        "/usr/bin/prlimit", f"--as={memory}", f"--fsize={config.disk_mb * 2**20}", f"--nproc={config.processes}",
        "--core=0", "--nofile=256", f"--cpu={int(config.seconds) + 2}", "--",
    ]  # fmt: skip


def _supervise(
    command: Sequence[str],
    stdin: bytes,
    environment: Mapping[str, str],
    config: SandboxConfig,
    folder: Path,
    *,
    cwd: Path | None,
    descriptors: tuple[int, ...] = (),
) -> Completed:
    """Run to the end or to the first limit; afterwards nothing that was started is left."""
    started = time.monotonic()
    before = _disk(folder)
    with tempfile.TemporaryFile() as source:
        source.write(stdin)
        source.seek(0)
        process = subprocess.Popen(
            command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=cwd, env=dict(environment),
            pass_fds=descriptors, start_new_session=True,
        )  # fmt: skip
    try:
        output, stopped = _watch(process, config, folder, before, started)
    finally:
        members = _descendants(process.pid)
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


def _watch(
    process: subprocess.Popen[bytes], config: SandboxConfig, folder: Path, before: tuple[int, int], started: float
) -> tuple[bytes, str | None]:
    kept, read, next_disk = bytearray(), 0, started + 0.1
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        is_open = True
        while True:
            if is_open and selector.select(_POLL_SECONDS):
                data = process.stdout.read(65_536)
                is_open = data != b""
                read += len(data or b"")
                kept += (data or b"")[: config.output_bytes - len(kept)]
            elif not is_open:
                time.sleep(_POLL_SECONDS)
            if process.poll() is not None and not (is_open and selector.select(0)):
                return bytes(kept), None
            now = time.monotonic()
            if now - started > config.seconds:
                return bytes(kept), "time"
            if read > 16 * config.output_bytes:
                return bytes(kept), "output"
            if reason := _over(process.pid, config):
                return bytes(kept), reason
            if now >= next_disk:
                size, files = _disk(folder)
                if (size > config.disk_mb * 2**20 and size > before[0]) or (files > config.files and files > before[1]):
                    return bytes(kept), "disk"
                next_disk = time.monotonic() + max(0.1, 4 * (time.monotonic() - now))


def _over(pid: int, config: SandboxConfig) -> str | None:
    members = _descendants(pid)
    if len(members) > config.processes + 4:  # bubblewrap's own among them
        return "processes"
    page, total = os.sysconf("SC_PAGE_SIZE"), 0
    for member in members:
        try:
            total += int(Path(f"/proc/{member}/statm").read_bytes().split()[1]) * page
        except (OSError, IndexError):
            continue  # it has ended meanwhile
    return "memory" if total > config.memory_mb * 2**20 else None


def _descendants(pid: int) -> list[int]:
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


def _kill(members: Sequence[int]) -> None:
    # without a sandbox: what has left the process group, as far as it could still be seen
    for member in members:
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _disk(folder: Path) -> tuple[int, int]:
    """Bytes on disk and number of entries below a folder; links are not followed."""
    size, count, queue = 0, 0, [str(folder)]
    while queue:
        try:
            with os.scandir(queue.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue  # removed while we looked
    return size, count
