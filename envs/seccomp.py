"""The system calls that sandboxed processes may not make, as a BPF program for bubblewrap's `--seccomp`.

Idea: namespaces take away what a process can name; this takes away the kernel interfaces that need no name: tracing others,
mounting, new namespaces, keys, BPF, performance counters, io_uring, modules, clocks, vsock and netlink sockets, and memory that
belongs to no process (memfd, System V), which nobody could count. Denied calls fail with EPERM, so that programs go on. Source:
linux/seccomp.h, linux/filter.h; numbers from the kernel's syscall tables.
"""

from __future__ import annotations

import platform
import struct

from longstraw_agents.errors import SandboxError

#: Denied on every architecture that has them: name -> (x86_64, aarch64) numbers; -1 where there is none.
DENIED: dict[str, tuple[int, int]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "setns": (308, 268), "unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116), "quotactl": (179, 60), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, -1),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "ioperm": (173, -1), "lookup_dcookie": (212, 18), "vhangup": (153, 58), "fanotify_init": (300, 262),
}  # fmt: skip

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24  # offsets in struct seccomp_data (little endian)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
_CLONE, _CLONE3, _SOCKET, _IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_ALLOWED_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: the network namespace holds only a loopback that is down


def program(machine: str | None = None) -> bytes:
    """The BPF program for this machine. Raises SandboxError for an architecture without a table."""
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise SandboxError(f"there is no system-call filter for {machine}; it exists for {', '.join(_MACHINES)}")
    column, audit = _MACHINES[machine]
    code = [_op(_LOAD, _ARCHITECTURE), _op(_JUMP_EQUAL, audit, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NUMBER)]
    if machine == "x86_64":  # the x32 calls would slip past the numbers below
        code += [_op(_JUMP_GREATER_EQUAL, 0x40000000, 0, 1), _op(_RETURN, _ENOSYS)]
    for numbers in DENIED.values():
        if numbers[column] >= 0:
            code += [_op(_JUMP_EQUAL, numbers[column], 0, 1), _op(_RETURN, _EPERM)]
    # clone3 keeps its flags in memory, where a filter can't look; callers fall back to clone
    code += [_op(_JUMP_EQUAL, _CLONE3[column], 0, 1), _op(_RETURN, _ENOSYS)]
    code += [_op(_JUMP_EQUAL, _CLONE[column], 0, 4), _op(_LOAD, _ARGUMENT_0), _op(_JUMP_SET, _NEW_NAMESPACES, 0, 1)]
    code += [_op(_RETURN, _EPERM), _op(_RETURN, _ALLOW)]
    code += [_op(_JUMP_EQUAL, _SOCKET[column], 0, 6), _op(_LOAD, _ARGUMENT_0)]
    code += [_op(_JUMP_EQUAL, family, 3 - index, 0) for index, family in enumerate(_ALLOWED_FAMILIES)]
    code += [_op(_RETURN, _EPERM), _op(_RETURN, _ALLOW)]
    code += [_op(_JUMP_EQUAL, _IOCTL[column], 0, 4), _op(_LOAD, _ARGUMENT_1), _op(_JUMP_EQUAL, _TIOCSTI, 1, 0)]
    code += [_op(_JUMP_EQUAL, _TIOCLINUX, 0, 1), _op(_RETURN, _EPERM), _op(_RETURN, _ALLOW)]
    return b"".join(code)


def _op(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, when_true, when_false, value)
