"""The sandbox: what gets out (nothing), what is bounded, and what happens without it."""

import os
import platform
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from longstraw_agents.envs import ToolLimits, sandbox, seccomp, tool
from longstraw_agents.envs.sandbox import Sandbox, SandboxConfig
from longstraw_agents.errors import ConfigError, SandboxError

needs_bubblewrap = pytest.mark.skipif(not sandbox.available(), reason="bubblewrap is missing")


@tool(isolated=True, limits=ToolLimits(seconds=20))
def add(a: int, b: int) -> int:
    """Add."""
    print("noise that is no result")
    return a + b


@tool(isolated=True, limits=ToolLimits(seconds=20))
def read(path: str) -> str:
    """Read."""
    return Path(path).read_text()


@tool(isolated=True, limits=ToolLimits(seconds=3))
def spin() -> str:
    """Never return, and ignore what can be ignored."""
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue


UNLINKED = """
import os, time
files = []
for i in range(8):
    files.append(open("f", "wb"))
    os.unlink("f")
    files[-1].write(bytes(3000000))
    files[-1].flush()
time.sleep(30)
"""
UNLINKED_AND_MAPPED = """
import mmap, os, time
maps = []
for i in range(8):
    with open("f", "w+b") as file:
        os.unlink("f")
        file.write(bytes(3000000))
        file.flush()
        maps.append(mmap.mmap(file.fileno(), 0))
os.closerange(3, 200)  # mmap keeps descriptors of its own
time.sleep(30)
"""
DEEP = """
import os, time
for i in range(3000):
    os.mkdir("d")
    os.chdir("d")
time.sleep(1)
"""
SOCKETS = """
import socket, time  # SOCK
pairs = [socket.socketpair() for i in range(120)]
time.sleep(30)
"""
FORKS = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(30)
        made += 1
except OSError:
    print(made, flush=True)
    time.sleep(0.2)
"""


@pytest.fixture
def box(tmp_path):
    folder = tmp_path / "agent"
    folder.mkdir()
    for parent in tmp_path.parents:  # pytest's folders are for their owner only
        if os.geteuid() == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o711)
    made = Sandbox(folder, SandboxConfig(seconds=5, memory_mb=200, processes=20, disk_mb=8, output_bytes=10_000))
    made.own()
    yield made
    sandbox.remove(folder)  # pytest can't remove what some tests leave


def sh(box, script, **more):
    return box.run(["/bin/sh", "-c", script], **more)


@needs_bubblewrap
class TestInside:
    def test_files_last_between_commands(self, box):
        assert sh(box, "echo hello > a; pwd").output == "/agent\n"
        assert sh(box, "cat a").output == "hello\n" and (box.folder / "a").read_text() == "hello\n"

    def test_status_input_and_variables(self, box):
        done = sh(box, 'cat; echo "$WORD"; exit 7', stdin=b"in\n", variables={"WORD": "out"})
        assert (done.status, done.output, done.stopped) == (7, "in\nout\n", None)

    def test_the_host_is_not_seen(self, box, monkeypatch):
        monkeypatch.setenv("SECRET_TOKEN", "swordfish")
        seen = sh(box, "env; ls / /etc /tmp; ls /proc | grep -c '^[0-9]'; cat /etc/passwd").output
        assert "swordfish" not in seen and "root" not in seen.split() and "No such file" in seen

    def test_read_only_means_read_only(self, box):
        assert sh(box, "echo x > b", write=False).status != 0 and not (box.folder / "b").exists()

    @pytest.mark.parametrize(
        "script, stopped",
        [
            ("sleep 60", "time"),
            ("trap '' TERM HUP INT; while :; do :; done", "time"),
            ("for i in 1 2 3 4; do python3 -c 'x = bytearray(10**8); import time; time.sleep(30)' & done; wait", "memory"),
            ("for i in 1 2 3 4; do head -c 7000000 /dev/zero > f$i; done; sleep 30", "disk"),
            ("yes", "output"),
            ("i=0; while [ $i -lt 2000 ]; do : > f$i; i=$((i+1)); done; sleep 30", "disk"),
            ("for i in 1 2 3 4; do head -c 7000000 /dev/zero > f$i; done", "disk"),  # ended before anybody looked
            (f"python3 -c '{UNLINKED}'", "disk"),
            (f"python3 -c '{UNLINKED_AND_MAPPED}'", "disk"),
            (f"python3 -c '{DEEP}'", "disk"),
            ("mkdir u; chmod 300 u; for i in 1 2 3 4; do head -c 7000000 /dev/zero > u/f$i; done; sleep 30", "disk"),
            (f"python3 -c '{SOCKETS}' & python3 -c '{SOCKETS}'", "memory"),
        ],
    )
    def test_limits(self, box, script, stopped):
        memory = 40 if "SOCK" in script else 200
        box.config = SandboxConfig(seconds=5, memory_mb=memory, processes=20, disk_mb=8, output_bytes=10_000, files=500)
        done = sh(box, script)
        assert done.stopped == stopped and done.seconds < 6

    def test_a_full_folder_does_not_grow(self, box):
        assert sh(box, "head -c 6000000 /dev/zero > a; head -c 6000000 /dev/zero > b").stopped == "disk"
        sh(box, "head -c 6000000 /dev/zero > c")
        assert (box.folder / "c").stat().st_size <= 65_536
        assert sh(box, "rm b c; echo room > d").stopped is None and sh(box, "cat d").output == "room\n"

    @pytest.mark.parametrize("number", ["memfd_create", "shmget", "msgget", "semget"])
    def test_memory_of_nobody_is_refused(self, box, number):
        numbers = {name: pair[platform.machine() == "aarch64"] for name, pair in seccomp.DENIED.items()}
        code = f"import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall({numbers[number]}, 0, 4096, 0o1600), "
        assert box.run(["/usr/bin/python3", "-c", code + "ctypes.get_errno())"]).output == "-1 1\n"

    @pytest.mark.parametrize("spoil", ["chmod 000 .", "echo 'bwrap: broken'; exit 1", "mkdir d; cd d; chmod 000 .. ."])
    def test_no_command_can_break_the_sandbox_for_the_next(self, box, spoil):
        sh(box, spoil)
        assert sh(box, "echo still here").output == "still here\n"

    def test_a_folder_is_removed_whatever_is_in_it(self, box):
        box.config = SandboxConfig(files=100_000)
        sh(box, f"python3 -c '{DEEP}'; mkdir s; echo x > s/f; chmod 000 s; ln -s / root")
        sandbox.remove(box.folder)
        assert not box.folder.exists() and Path("/usr/bin").exists()

    def test_forking_is_bounded(self, box):
        done = box.run(["/usr/bin/python3", "-c", FORKS])
        assert done.stopped == "processes" or int(done.output) < 20

    def test_nothing_is_left(self, box):
        mark = f"77{os.getpid()}"
        sh(box, f"setsid sleep {mark} >/dev/null 2>&1 & sleep 0.1")
        box.config = SandboxConfig(seconds=0.5)
        sh(box, f"nohup sleep {mark} & sleep {mark}")
        shown = subprocess.run(["ps", "-eo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True).stdout
        assert f"sleep {mark}" not in shown
        assert not [line for line in shown.splitlines() if "bwrap" in line and line.split()[1] == str(os.getpid())]

    def test_isolated_tools(self):
        assert add.run({"a": 1, "b": "2"}).result == "3"
        assert "bad arguments" in add.run({"a": "x", "b": 2}).error
        assert "FileNotFoundError" in read.run({"path": "/etc/passwd"}).error
        outcome = spin.run({})
        assert "limit on time" in outcome.error and outcome.seconds < 4


    @pytest.mark.parametrize(
        "probe",
        [
            "read a host file", "follow a link to the root", "make a hard link", "connect to a host port",
            "kill the parent's helper", "connect to an abstract unix socket", "open a netlink socket", "open a vsock socket",
            "read an inherited descriptor", "enter a user namespace", "clone into a namespace", "hold capabilities",
            "become another user", "add a key", "attach shared memory of the host", "leave a process behind",
            "leave a file in the host's /dev/shm",
        ],
    )  # fmt: skip
    def test_escapes(self, probe):
        from benchmarks.escape_probes import outcomes

        inside, without = outcomes([probe])[probe]
        if not without:
            pytest.skip("this machine does not allow it even without the sandbox")
        assert not inside


class TestWithout:
    @pytest.fixture(autouse=True)
    def missing(self, monkeypatch):
        monkeypatch.setattr(sandbox, "available", lambda: False)

    def test_nothing_runs_without_bubblewrap(self, box, monkeypatch):
        monkeypatch.delenv(sandbox.UNSAFE_VARIABLE, raising=False)
        with pytest.raises(SandboxError, match="--unsafe-no-sandbox"):
            sh(box, "echo ran > proof")
        assert not (box.folder / "proof").exists()

    def test_unless_the_user_says_so(self, box, monkeypatch):
        monkeypatch.setenv(sandbox.UNSAFE_VARIABLE, "1")
        assert sh(box, "echo ran; sleep 0.2; pwd").output.splitlines() == ["ran", str(box.folder)]
        box.config = SandboxConfig(seconds=0.5)
        assert sh(box, "sleep 60").stopped == "time"

    def test_unsafe_where_the_tools_of_linux_are_missing(self, box, monkeypatch):
        monkeypatch.setenv(sandbox.UNSAFE_VARIABLE, "1")
        monkeypatch.setattr(sandbox.shutil, "which", lambda *arguments, **more: None)  # as on macOS
        assert sh(box, "echo ran").output == "ran\n"

    def test_windows_is_sent_to_wsl(self, monkeypatch):
        monkeypatch.setattr(sandbox, "os", types.SimpleNamespace(name="nt", environ={sandbox.UNSAFE_VARIABLE: "1"}))
        with pytest.raises(SandboxError, match="WSL 2"):
            sandbox.require()


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="above 0"):
        SandboxConfig(memory_mb=0)


def test_the_filter_says_which_machines_it_knows():
    assert len(seccomp.program("x86_64")) % 8 == 0 and len(seccomp.program("aarch64")) % 8 == 0
    with pytest.raises(SandboxError, match="x86_64"):
        seccomp.program("mips")


@pytest.mark.skipif(sys.platform != "linux", reason="numbers of Linux")
def test_the_denied_numbers_are_the_kernels():
    header = next((path for path in map(Path, ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"))
                   if path.exists()), None)  # fmt: skip
    if header is None:
        pytest.skip("the kernel's headers are missing")
    numbers = {line.split()[1].removeprefix("__NR_"): int(line.split()[2]) for line in header.read_text().splitlines()
               if line.startswith("#define __NR_")}  # fmt: skip
    for name, (number, _) in seccomp.DENIED.items():
        assert numbers.get(name, number) == number, name
