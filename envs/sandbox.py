"""The sandbox: commands of an agent run in namespaces of their own, under a system-call filter and limits.

Idea: bubblewrap gives a process an empty root with the system's programs read-only, its own process list, no network, and one
folder that it may change. A filter (see `seccomp`) closes the kernel's other doors, rlimits bind each process, and the
supervisor (see there) binds them all together: time, memory, number of processes, disk, output. Killing bubblewrap kills
everything inside. Without bubblewrap nothing runs, unless the user has asked for that with `--unsafe-no-sandbox`.

Vocabulary
    folder    the host folder that is /agent inside, the only place whose changes last
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from longstraw_agents.envs.seccomp import program
from longstraw_agents.envs.supervisor import Completed, SandboxConfig, disk, supervise
from longstraw_agents.errors import SandboxError

__all__ = ["UNSAFE_VARIABLE", "Completed", "Sandbox", "SandboxConfig", "available", "obstacle", "remove", "require"]

log = logging.getLogger(__name__)

#: Set to 1 (the command line's `--unsafe-no-sandbox` does) to run commands without a sandbox where there is none.
UNSAFE_VARIABLE = "LONGSTRAW_UNSAFE_NO_SANDBOX"

_LEAST_FILE_BYTES = 65_536
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_INSIDE = {"PATH": "/usr/bin:/bin", "HOME": "/agent", "LANG": "C.UTF-8", "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}


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
        if available():
            return self._boxed(command, stdin, readable, environment, write)
        require()
        environment["HOME"] = str(self.folder)
        before = self._unlock()
        full = [*_limits(self.config, before[0], sandboxed=False), *command]
        return supervise(full, stdin, environment, self.config, self.folder, before=before, cwd=self.folder)

    def _boxed(
        self, command: Sequence[str], stdin: bytes, readable: Sequence[Path], variables: Mapping[str, str], write: bool
    ) -> Completed:
        _adopt_orphans()
        before = self._unlock()
        with tempfile.TemporaryFile() as filter_file, tempfile.TemporaryFile() as told:
            filter_file.write(program())
            filter_file.seek(0)
            descriptors = (filter_file.fileno(), told.fileno())
            box = self._bubblewrap(descriptors, readable, variables, write)
            full = [*_first_to_go(), *box, *_limits(self.config, before[0]), *command]
            try:
                done = supervise(
                    full, stdin, {}, self.config, self.folder, before=before, cwd=None, descriptors=descriptors
                )  # fmt: skip
            finally:
                said = _told(told)
                _bury(said)
        if done.stopped is None and "exit-code" not in said:  # only this tells; a command may print and return what it likes
            raise SandboxError(f"bubblewrap could not build the sandbox: {done.output.strip()[:300]}")
        return done

    def _unlock(self) -> tuple[float, int]:
        """What is in the folder (see `disk`), with its owner's rights given back where a command took them away.

        No command shall make the next one, the hidden tests least of all, fail to start. Nothing runs now that could put a link
        in a folder's place.
        """
        mode = self.folder.stat().st_mode
        if mode & 0o711 != 0o711:
            self.folder.chmod(mode | 0o711)
        seen = disk(self.folder)
        if math.isinf(seen[0]):
            subprocess.run(["chmod", "-R", "u+rwX", "--", str(self.folder)], stderr=subprocess.DEVNULL, check=False)
            seen = disk(self.folder)
        return seen

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
        command += ["--json-status-fd", str(descriptors[1]), "--"]
        if os.geteuid() == 0:
            user = str(self._uid)
            command += ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
            command += ["--bounding-set=-all", "--inh-caps=-all", "--"]
        return command


def available() -> bool:
    """Whether commands can be run in a sandbox here (tried once)."""
    return obstacle() is None


@functools.cache
def obstacle() -> str | None:
    """Why there is no sandbox here; None where one could be built, with all that commands get."""
    for name in ("bwrap", "prlimit", "setpriv"):
        if shutil.which(name, path=None if name == "bwrap" else "/usr/bin") is None:
            return f"{name} is missing"
    folder = Path(tempfile.mkdtemp(prefix="longstraw-trial-"))
    try:
        box = Sandbox(folder)
        box.own()
        done = box._boxed(["/usr/bin/true"], b"", (), _INSIDE, True)
        return None if done.status == 0 and done.stopped is None else f"a trial ended with {done}"
    except SandboxError as error:
        return str(error)
    finally:
        remove(folder)


def require() -> None:
    """Raise SandboxError where there is no sandbox and the user has not allowed to go without."""
    if available():
        return
    if os.name != "posix":
        raise SandboxError("this environment runs commands as Linux does; on Windows use WSL 2 (docs/environments/sandbox.md)")
    if os.environ.get(UNSAFE_VARIABLE) != "1":
        raise SandboxError(
            f"this environment runs commands in a bubblewrap sandbox, and there is none here: {obstacle()}. Install it "
            "(Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap), or pass --unsafe-no-sandbox to run "
            "them with your own rights (see docs/environments/sandbox.md)"
        )


def remove(folder: Path) -> None:
    """Remove a folder that commands wrote into, however deep it is and whatever rights they left; links are not followed.

    By coreutils: `shutil.rmtree` recurses, and fails where folders nest by the thousand.
    """
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    if folder.exists():
        log.warning("%s could not be removed", folder)


@functools.cache
def _adopt_orphans() -> None:
    # bubblewrap may end before the first process inside it does. That orphan would go to process 1, which in a container often
    # never collects: a dead process would stay for each command. As their adoptive parent we collect them ourselves.
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise SandboxError(f"prctl(PR_SET_CHILD_SUBREAPER) failed: {os.strerror(ctypes.get_errno())}")


def _told(file: IO[bytes]) -> dict[str, int]:
    """What bubblewrap has written down: "child-pid" once there is a first process inside, "exit-code" if it ran the command."""
    file.seek(0)
    return {name: value for line in file.read().splitlines() for name, value in json.loads(line).items()}


def _bury(said: Mapping[str, int]) -> None:
    """End and collect the first process of a sandbox."""
    if "child-pid" not in said:
        return  # bubblewrap failed before it made one
    first = said["child-pid"]
    try:
        if os.waitpid(first, os.WNOHANG) == (0, 0):
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
    except ChildProcessError:
        return  # bubblewrap has collected it


def _first_to_go() -> list[str]:
    # Where memory runs out, the kernel ends what is in the sandbox before it ends training; set before rights are given up.
    # Where processors run short, 64 busy processes inside must not keep the supervisor from looking.
    last = ["/usr/bin/nice", "-n", "10"]
    chosen = shutil.which("choom", path="/usr/bin")
    return [chosen, "-n", "500", "--", *last] if chosen else last


def _limits(config: SandboxConfig, used: float, *, sandboxed: bool = True) -> list[str]:
    """The limits that the kernel keeps for each process; `used`: bytes on disk already, files may take what is left."""
    if not sandboxed and shutil.which("prlimit", path="/usr/bin") is None:
        return []  # not Linux: what is left are the limits that are looked at
    memory = (config.memory_mb + 64) * 2**20  # address space; the supervisor counts what is resident
    left = int(max(config.disk_mb * 2**20 - used, _LEAST_FILE_BYTES))
    # without a sandbox the limit on processes would count all that the user runs
    processes = [f"--nproc={config.processes}"] if sandboxed else []
    return [
        "/usr/bin/prlimit", f"--as={memory}", f"--fsize={left}", *processes, "--core=0", "--nofile=256", "--msgqueue=0",
        f"--cpu={int(config.seconds) + 2}", "--",
    ]  # fmt: skip
