"""Attempts to get out of the sandbox, each a small Python program that exits with 42 where it succeeded.

Idea: a probe that fails proves little by itself; so each is also run without the sandbox, with the same rights as the process
that starts sandboxes, and counts only if it succeeds there. What probes aim at is planted for them: a secret file, an
environment variable, an open file, helper processes, listeners, kernel objects. {name} stands for what is planted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from longstraw_agents.envs.sandbox import Sandbox, SandboxConfig

SECRET = "swordfish-7731"
PYTHON = "/usr/bin/python3"

_PRELUDE = """
import ctypes, os, socket, struct, sys, time, signal, resource, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def won(condition=True):
    if condition: os._exit(42)
def has(path):
    won({secret!r} in open(path, errors='replace').read())
def put(path, text, flags=0):
    won(os.write(os.open(path, os.O_WRONLY | flags), text.encode()) == len(text))
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    won(result >= 0)
pid = {pid}
"""

#: name -> code. Numbers are x86_64's system calls.
_CODE: dict[str, str] = {
    # files
    "read a host file": "has({folder!r} + '/secret')",
    "list a host folder": "won('secret' in os.listdir({folder!r}))",
    "read /etc/passwd": "won('root:' in open('/etc/passwd').read())",
    "read /etc/shadow": "won('root:' in open('/etc/shadow').read())",
    "read /etc/hosts": "won(len(open('/etc/hosts').read()) > 0)",
    "list the home folder": "won(len(os.listdir(os.path.dirname({home!r}) if not os.listdir({home!r}) else {home!r})) > 0)",
    "list /var/lib": "won(len(os.listdir('/var/lib')) > 0)",
    "list /sys/kernel": "won(len(os.listdir('/sys/kernel')) > 0)",
    "write into a host folder": "put({folder!r} + '/planted', 'x', os.O_CREAT)",
    "overwrite a host file": "put({folder!r} + '/victim', 'x')",
    "delete a host file": "os.unlink({folder!r} + '/deletable'); won()",
    "rename a host file": (
        "os.rename({folder!r} + '/movable', {folder!r} + '/moved'); os.rename({folder!r} + '/moved', {folder!r} + "
        "'/movable'); won()"
    ),
    "change a host file's mode": "os.chmod({folder!r} + '/victim', 0o777); won()",
    "write into /etc": "open('/etc/longstraw-probe', 'w').close(); os.unlink('/etc/longstraw-probe'); won()",
    "write into /usr": "open('/usr/longstraw-probe', 'w').close(); os.unlink('/usr/longstraw-probe'); won()",
    "write into the root folder": "open('/longstraw-probe', 'w').close(); os.unlink('/longstraw-probe'); won()",
    "write into /var/tmp": "open('/var/tmp/longstraw-probe', 'w').close(); os.unlink('/var/tmp/longstraw-probe'); won()",
    "schedule a job": "open('/etc/cron.d/longstraw-probe', 'w').close(); os.unlink('/etc/cron.d/longstraw-probe'); won()",
    "leave a file in the host's /tmp": "open('/tmp/' + {mark!r}, 'w').close()",
    "leave a file in the host's /dev/shm": "open('/dev/shm/' + {mark!r}, 'w').close()",
    "follow a symbolic link": "os.symlink({folder!r} + '/secret', 'link'); has('link')",
    "follow a link to the root": "os.symlink('/', 'root'); has('root' + {folder!r} + '/secret')",
    "make a hard link": "os.link({folder!r} + '/secret', 'hard'); has('hard')",
    "climb with ..": "has('../' * 20 + {folder!r}.lstrip('/') + '/secret')",
    "read through /proc/self/root": "has('/proc/self/root' + {folder!r} + '/secret')",
    "read through /proc/1/root": "has('/proc/1/root' + {folder!r} + '/secret')",
    "read through a host process's root": "has(f'/proc/{{pid}}/root' + {folder!r} + '/secret')",
    "read through a host process's folder": "has(f'/proc/{{pid}}/cwd/secret')",
    "make a device": "os.mknod('device', 0o20666, os.makedev(1, 5)); won()",
    "find a disk": (
        "won(any(os.path.exists(p) and open(p, 'rb') for p in ('/dev/vda', '/dev/sda', '/dev/nvme0n1', '/dev/mem', "
        "'/dev/kmsg', '/dev/loop0')))"
    ),
    "make a set-user-id file of root": (
        "open('suid', 'w').close(); os.chown('suid', 0, 0); os.chmod('suid', 0o4755); won(os.stat('suid').st_uid == 0)"
    ),
    "give a file capabilities": (
        "open('caps', 'w').close(); os.setxattr('caps', 'security.capability', struct.pack('<IIIII', 0x02000001, 1 << "
        "21, 0, 0, 0)); won()"
    ),
    # mounts and namespaces
    "bind a host folder": (
        "won(libc.mount({folder!r}.encode(), b'/mnt', None, 4096, None) == 0 and (libc.umount2(b'/mnt', 2) or True))"
    ),
    "mount a file system": "won(libc.mount(b't', b'/mnt', b'tmpfs', 0, None) == 0 and (libc.umount2(b'/mnt', 2) or True))",
    "change the root": "os.chroot({folder!r}); won()",
    "enter a user namespace": "won(libc.unshare(0x10000000) == 0)",
    "enter a mount namespace": "won(libc.unshare(0x00020000) == 0)",
    "clone into a namespace": "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "join a host process's network": "won(libc.setns(os.open(f'/proc/{{pid}}/ns/net', 0), 0) == 0)",
    "open a file system context": "call(430, b'tmpfs', 0)",
    "detach a tree": "call(428, -100, b'/', 1)",
    # processes
    "see a host process": "won({mark!r} in open(f'/proc/{{pid}}/cmdline').read())",
    "see all processes": "won(len([p for p in os.listdir('/proc') if p.isdigit()]) > 12)",
    "read a host process's environment": "has(f'/proc/{{pid}}/environ')",
    "read a host process's memory map": "won(len(open(f'/proc/{{pid}}/maps').read()) > 0)",
    "list a host process's files": "won(len(os.listdir(f'/proc/{{pid}}/fd')) > 0)",
    "reach a host process": "os.kill(pid, 0); won({mark!r} in open(f'/proc/{{pid}}/cmdline').read())",
    "stop a host process": (
        "os.kill(pid, 19); time.sleep(0.1); os.kill(pid, 18); won({mark!r} in open(f'/proc/{{pid}}/cmdline').read())"
    ),
    "kill the parent's helper": "os.kill({victim}, 9)",
    "trace a host process": "won(libc.ptrace(16, pid, None, None) == 0)",
    "trace at all": "won(libc.ptrace(0, 0, None, None) == 0)",
    "read another process's memory": (
        "b = ctypes.create_string_buffer(8); v = struct.pack('QQ', ctypes.addressof(b), 8); call(310, os.getpid(), v, "
        "1, v, 1, 0)"
    ),
    "hold a host process by descriptor": "os.pidfd_open(pid); won({mark!r} in open(f'/proc/{{pid}}/cmdline').read())",
    "read a host process's limits": (
        "resource.prlimit(pid, resource.RLIMIT_NOFILE); won({mark!r} in open(f'/proc/{{pid}}/cmdline').read())"
    ),
    "move a host process": (
        "os.sched_setaffinity(pid, os.sched_getaffinity(pid)); won({mark!r} in open(f'/proc/{{pid}}/cmdline').read())"
    ),
    "renice a host process": "os.setpriority(os.PRIO_PROCESS, pid, 1); won({mark!r} in open(f'/proc/{{pid}}/cmdline').read())",
    "leave a process behind": (
        "os.fork() and os._exit(0); os.setsid(); os.execv('/bin/sh', ['sh', '-c', 'sleep 30; : {mark}-orphan'])"
    ),
    "become another user": "os.setuid(1 if os.getuid() != 1 else 2); won()",
    "hold capabilities": (
        "won(any(int(l.split()[1], 16) for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapPrm'))))"
    ),
    "raise a limit": (
        "s, h = resource.getrlimit(resource.RLIMIT_NPROC); resource.setrlimit(resource.RLIMIT_CORE, (h if h > 0 else 1,"
        " -1)); won()"
    ),
    "protect oneself from the out-of-memory killer": "put('/proc/self/oom_score_adj', '-500')",
    "take a higher priority": "os.nice(-5); won()",
    # network
    "connect to a host port": "socket.create_connection(('127.0.0.1', {port}), 2); won()",
    "connect to a host's unix socket": "s = socket.socket(socket.AF_UNIX); s.connect({folder!r} + '/socket'); won()",
    "connect to an abstract unix socket": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + {mark!r}); won()",
    "send a datagram to the host": (
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2); s.sendto(b'x', ('127.0.0.1', {udp})); "
        "won(s.recv(1) == b'y')"
    ),
    "open a netlink socket": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); won()",
    "open a packet socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); won()",
    "open a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); won()",
    "open a vsock socket": "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); won()",
    "open a Bluetooth or ALG socket": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET); won()",
    "see network interfaces": "won(any('eth' in l or 'en' in l.split(':')[0] for l in open('/proc/net/dev')))",
    # secrets
    "read a secret variable": "won(os.environ.get('PROBE_SECRET') == {secret!r})",
    "read the parent's environment": "has(f'/proc/{{os.getppid()}}/environ')",
    "read an inherited descriptor": (
        "[won({secret!r}.encode() in os.pread(fd, 100, 0)) for fd in range(3, 64) if os.path.exists("
        "f'/proc/self/fd/{{fd}}') and os.path.isfile(f'/proc/self/fd/{{fd}}')]"
    ),
    "find the hidden tests": "won(any('hidden_tests.json' in files for top, _, files in os.walk({folder!r})))",
    "change the reward file": "put({folder!r} + '/reward', '1.0')",
    # kernel
    "set the host's name": "won(libc.sethostname(socket.gethostname().encode(), len(socket.gethostname())) == 0)",
    "add a key": "call(248, b'user', b'probe', b'x', 1, -2)",
    "read the kernel log": "won(libc.klogctl(10, None, 0) >= 0)",
    "load a BPF map": "a = struct.pack('IIII', 2, 4, 4, 1) + bytes(100); call(321, 0, a, len(a))",
    "count performance events": "a = struct.pack('IIQ', 1, 128, 0) + bytes(112); call(298, a, 0, -1, -1, 0)",
    "handle faults of memory": "call(323, 1)",
    "set up io_uring": "call(425, 8, ctypes.create_string_buffer(256))",
    "name a file by handle": (
        "h = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128)); call(303, -100, b'/', h, "
        "ctypes.byref(ctypes.c_int()), 0)"
    ),
    "watch the file system": "call(300, 0, 0)",
    "read the kernel's clock state": "t = ctypes.create_string_buffer(512); call(159, t)",
    "write a kernel setting": "put('/proc/sys/vm/swappiness', open('/proc/sys/vm/swappiness').read())",
    "attach shared memory of the host": "won(libc.shmget({key}, 0, 0) >= 0)",
    "open a message queue of the host": "won(libc.msgget({key}, 0) >= 0)",
    "open a semaphore of the host": "won(libc.semget({key}, 0, 0) >= 0)",
    "compare kernel objects": "call(312, os.getpid(), os.getpid(), 1, 0, 0)",
    "use the I/O ports": "won(libc.iopl(3) == 0)",
    "use a 32-bit style call": "call(0x40000000 + 39)",
    "use a call of 32-bit programs": (
        "import mmap; m = mmap.mmap(-1, 4096, prot=7); m.write(bytes.fromhex('5389f8bb00000000b814000000cd805bc3')); "
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m))); won(f() > 0)"
    ),
    "write to the kernel's trigger": "put('/proc/sysrq-trigger', 'h')",
    "choose what runs at a crash": "put('/proc/sys/kernel/core_pattern', open('/proc/sys/kernel/core_pattern').read())",
    "write to the kernel log": "put('/dev/kmsg', 'longstraw probe')",
    "read the kernel's memory": "won(os.read(os.open('/proc/kcore', os.O_RDONLY), 4) == b'\x7fELF')",
    "read the kernel's symbols": "won(any(int(l.split()[0], 16) for l in open('/proc/kallsyms')))",
    "read a disk": (
        "n = [l.split()[:4] for l in open('/proc/partitions').readlines()[2:]]; os.mknod('disk', 0o60600, os.makedev(int("
        "n[0][0]), int(n[0][1]))); won(len(os.read(os.open('disk', os.O_RDONLY), 512)) == 512)"
    ),
    "make a control group": (
        "import glob; [won(os.mkdir(p + '/longstraw-probe') is None and os.rmdir(p + '/longstraw-probe') is None) for p in "
        "glob.glob('/sys/fs/cgroup/*/') + ['/sys/fs/cgroup'] if os.access(p, os.W_OK)]"
    ),
    "run before all others": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); won()",
    "signal a host process group": "os.killpg(os.getpgid(pid), 0); won({mark!r} in open(f'/proc/{{pid}}/cmdline').read())",
    "write a host process's memory": "won(os.open(f'/proc/{{pid}}/mem', os.O_RDWR) >= 0)",
    "hold memory as a nameless file": "won(os.memfd_create('probe') >= 0)",
    "hold memory as a shared segment": "i = libc.shmget(0, 4096, 0o1600); won(i >= 0 and libc.shmctl(i, 0, None) == 0)",
    "hold memory as messages": "i = libc.msgget(0, 0o1600); won(i >= 0 and libc.msgctl(i, 0, None) == 0)",
}  # fmt: skip

PROBES = tuple(_CODE)


@contextlib.contextmanager
def planted() -> Iterator[dict[str, object]]:
    """Everything that probes aim at, made anew and taken away afterwards."""
    mark = f"longstraw-probe-{os.getpid()}-{time.monotonic_ns()}"
    folder = Path(tempfile.mkdtemp(prefix="longstraw-host-"))
    for name in ("secret", "victim", "deletable", "movable", "reward", "hidden_tests.json"):
        (folder / name).write_text(SECRET)
    helper = [sys.executable, "-c", "import time; time.sleep(600)", mark]
    environment = {**os.environ, "PROBE_SECRET": SECRET}
    watched = subprocess.Popen(helper, cwd=folder, env=environment)
    victim = subprocess.Popen(helper, cwd=folder)
    servers = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX), socket.socket()]
    servers[0].bind(str(folder / "socket"))
    servers[1].bind("\0" + mark)
    servers[2].bind(("127.0.0.1", 0))
    for server in servers:
        server.listen()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    threading.Thread(target=_echo, args=(datagrams,), daemon=True).start()
    libc, key = ctypes.CDLL(None), 0x4C530000 + os.getpid() % 65536
    made = (libc.shmget(key, 4096, 0o1666), libc.msgget(key, 0o1666), libc.semget(key, 1, 0o1666))
    try:
        yield {
            "folder": str(folder), "secret": SECRET, "mark": mark, "pid": watched.pid, "victim": victim.pid, "key": key,
            "port": servers[2].getsockname()[1], "udp": datagrams.getsockname()[1], "home": str(Path.home()), "helper": victim,
        }  # fmt: skip
    finally:
        libc.shmctl(made[0], 0, None), libc.msgctl(made[1], 0, None), libc.semctl(made[2], 0, 0)
        for server in (*servers, datagrams):
            server.close()
        for process in (watched, victim):
            process.kill()
            process.wait()
        for left in (Path("/tmp", mark), Path("/dev/shm", mark)):
            left.unlink(missing_ok=True)
        shutil.rmtree(folder)


def _echo(datagrams: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            _, sender = datagrams.recvfrom(1)
            datagrams.sendto(b"y", sender)


def outcomes(names: Sequence[str]) -> dict[str, tuple[bool, bool]]:
    """name -> (succeeded inside the sandbox, succeeded without it)."""
    return {name: (_attempt(name, sandboxed=True), _attempt(name, sandboxed=False)) for name in names}


def _attempt(name: str, *, sandboxed: bool) -> bool:
    with planted() as what, tempfile.TemporaryDirectory(prefix="longstraw-probe-") as folder:
        code = (_PRELUDE + _CODE[name]).format(**what)
        command = [PYTHON, "-c", code]
        secret = os.open(f"{what['folder']}/secret", os.O_RDONLY)
        os.set_inheritable(secret, True)
        os.environ["PROBE_SECRET"] = SECRET
        try:
            if sandboxed:
                box = Sandbox(Path(folder), SandboxConfig(seconds=5))
                box.own()
                status = box.run(command).status
            else:
                status = _unprotected(command, folder)
        finally:
            del os.environ["PROBE_SECRET"]
            os.close(secret)
        return status == 42 or _effect(name, what)


def _unprotected(command: Sequence[str], folder: str) -> int:
    process = subprocess.Popen(command, cwd=folder, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _effect(name: str, what: dict[str, object]) -> bool:
    """Whether a probe that can't judge itself left its mark outside."""
    if name.startswith("leave a file in the host's "):
        return Path(name.removeprefix("leave a file in the host's "), str(what["mark"])).exists()
    if name == "kill the parent's helper":
        time.sleep(0.1)
        return what["helper"].poll() is not None  # type: ignore[attr-defined]
    if name == "leave a process behind":
        time.sleep(0.2)
        marker = f"{what['mark']}-orphan".encode()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if marker in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)
                    return True
    return False
