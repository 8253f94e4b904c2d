"""The sandbox of a program: Landlock, seccomp and resource limits, each set by system calls.

`enter` is called in the program's own process and cannot be undone there. A layer that `layers` has reported is set up
or raises `OSError`: no program runs with less protection than was reported.

Does not start a program, and does not limit the program's folder and threads: server.py does.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress

from grpo_math.errors import UserError
from grpo_math.tools import syscalls
from grpo_math.tools.limits import PythonLimits

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
SECCOMP, SECCOMP_GET_ACTION_AVAIL = {"x86_64": 317, "aarch64": 277}, 2
CAPSET, CAPABILITIES_3 = {"x86_64": 126, "aarch64": 91}, 0x20080522
# Rights of <linux/landlock.h>
WRITE, READ, LIST, FILES_OF_FOLDER = 2, 4, 8, 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12
REFER, TRUNCATE, IOCTL = 1 << 13, 1 << 14, 1 << 15
PATH_BENEATH = 1

DEVICES = ("/dev/null", "/dev/urandom")
FILE_MB = 64  # of one file; server.py applies the same limit to the whole folder
OPEN_FILES = 64

libc = ctypes.CDLL(None, use_errno=True)


def layers() -> dict[str, int]:
    """Return what the kernel supports: Landlock's version (0: none) and seccomp (0 or 1)."""
    landlock = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    action = ctypes.c_uint32(syscalls.ERRNO)
    number = SECCOMP.get(platform.machine(), -1)
    seccomp = libc.syscall(number, SECCOMP_GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0
    return {"landlock": max(landlock, 0), "seccomp": int(seccomp and syscalls.machine() is not None)}


def require_layers(limits: PythonLimits) -> list[str]:
    """Raise `UserError` if the kernel lacks a layer of the sandbox; with ``walls: any`` return warnings instead."""
    without = {
        "landlock": "no Landlock (Linux 5.13 or newer, not gVisor): a program can read and change your files",
        "seccomp": "no seccomp: a program can open connections, start programs and signal other processes",
    }
    missing = [without[layer] for layer, version in layers().items() if not version]
    if missing and limits.walls == "all":
        remedy = "Train on another machine, leave python out of tools, or accept the risk with python: {walls: any}"
        raise UserError(f"the Python tool cannot be sandboxed here: {'; '.join(missing)}. {remedy}")
    return [f"the Python tool is only partly sandboxed here: {reason}" for reason in missing]


def enter(support: dict[str, int], limits: dict[str, int], paths: Sequence[str], folder: str) -> None:
    """Restrict this process permanently. It can read ``paths``, read and write ``folder``, and open nothing else."""
    memory = memory_in_use() + (limits["memory_mb"] << 20)
    for kind, limit in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_FSIZE, FILE_MB << 20),
    ):
        resource.setrlimit(kind, (limit, limit))
    with open("/proc/self/oom_score_adj", "w") as score:  # if the machine runs out of memory, this process ends first
        score.write("1000")
    os.chdir(folder)
    # Root's programs keep their user, but lose every capability.
    _call(libc.syscall(CAPSET[platform.machine()], struct.pack("Ii", CAPABILITIES_3, 0), bytes(24)), "capset")
    _call(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    _call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if support["landlock"]:
        _restrict_files(support["landlock"], paths, folder)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if support["seccomp"]:
        code = syscalls.program()
        buffer = ctypes.create_string_buffer(code, len(code))
        filter = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
        _call(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter, 0, 0), "seccomp")


def memory_in_use() -> int:
    """Return the address space of this process in bytes. A program's memory limit is added to it."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * os.sysconf("SC_PAGESIZE")


def _restrict_files(version: int, paths: Sequence[str], folder: str) -> None:
    # Each version of Landlock supports more rights. Seccomp rejects the operations whose rights are missing: emptying a
    # file that is open for reading (before 3), connections (before 4), signals (before 6).
    known = (1 << 13) - 1 | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    known |= IOCTL if version >= 5 else 0
    rules = struct.pack("QQQ", known, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _call(libc.syscall(LANDLOCK_CREATE, rules, ctypes.c_size_t(size), 0), "landlock")
    rights = dict.fromkeys(paths, READ | LIST) | dict.fromkeys(DEVICES, READ | WRITE)
    rights[folder] = WRITE | READ | LIST | FILES_OF_FOLDER | REFER | TRUNCATE
    for path, granted in rights.items():
        with suppress(FileNotFoundError):
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", granted & known, file)
            _call(libc.syscall(LANDLOCK_ADD, ruleset, PATH_BENEATH, rule, 0), "landlock")
            os.close(file)
    _call(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def _call(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
