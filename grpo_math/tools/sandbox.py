"""The sandbox of a program: Landlock, seccomp and resource limits, each set by system calls.

`enter` is called in the program's own process and cannot be undone there. Every layer is set up, or `enter` raises
`OSError`: no program runs without one of them.

server.py limits the program's folder and threads.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from grpo_math.errors import UserError
from grpo_math.tools import syscalls

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
CAPSET, CAPABILITIES_3 = {"x86_64": 126, "aarch64": 91}, 0x20080522
# Rights of <linux/landlock.h>
WRITE, READ, LIST, DELETE, MAKE, TRUNCATE, IOCTL = 2, 4, 8, 1 << 5, 1 << 8, 1 << 14, 1 << 15
# By the version of Landlock that adds them: rights on files, and the size of struct landlock_ruleset_attr.
RIGHTS = {1: (1 << 13) - 1, 3: TRUNCATE, 5: IOCTL}
SIZES = {1: 8, 4: 16, 6: 24}
PATH_BENEATH = 1

DEVICES = ("/dev/null", "/dev/urandom")
FILE_MB = 64  # of one file; server.py applies the same limit to the whole folder
OPEN_FILES = 64

libc = ctypes.CDLL(None, use_errno=True)


def layers() -> dict[str, int]:
    """Return what the kernel supports: Landlock's version (below 1: none) and seccomp (0 or 1)."""
    # With the flag 1, the call creates nothing and returns the version.
    landlock = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    # A kernel that has seccomp filters tries to read a filter at address 0, and fails with EFAULT.
    libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None)
    return {"landlock": landlock, "seccomp": int(ctypes.get_errno() == errno.EFAULT)}


def require_layers() -> None:
    """Raise `UserError` if the kernel lacks a layer of the sandbox."""
    without = {
        "landlock": "no Landlock (Linux 5.13 or newer, not gVisor), so a program could read and change your files",
        "seccomp": "no seccomp, so a program could open connections, start programs and signal other processes",
    }
    missing = [without[layer] for layer, version in layers().items() if version < 1]
    if missing:
        remedy = "train on another machine, or leave python out of tools"
        raise UserError(f"the Python tool cannot be sandboxed here ({'; '.join(missing)}): {remedy}")


def enter(limits: dict[str, int], paths: Sequence[str], folder: str) -> None:
    """Restrict this process permanently. It can read ``paths``, read and write ``folder``, and open nothing else."""
    # The address space that the interpreter uses already. Read now, because Landlock closes /proc.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + (limits["memory_mb"] << 20)
    for kind, limit in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_FSIZE, FILE_MB << 20),
    ):
        resource.setrlimit(kind, (limit, limit))

    # If the machine runs out of memory, this process ends first.
    Path("/proc/self/oom_score_adj").write_text("1000")
    os.chdir(folder)

    # Root's programs keep their user, but lose every capability. The zero bytes are three sets of 64 bits.
    _call(libc.syscall(CAPSET[platform.machine()], struct.pack("Ii", CAPABILITIES_3, 0), bytes(24)), "capset")
    # The program ends with its supervisor. The seccomp filter rejects this call, so the program cannot undo it.
    _call(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
    # Without CAP_SYS_ADMIN, the kernel accepts a Landlock ruleset and a filter only after this call.
    _call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _restrict_files(layers()["landlock"], paths, folder)

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    code = syscalls.program()
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions, padding, and their address.
    filter = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _call(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter), "seccomp")


def _restrict_files(version: int, paths: Sequence[str], folder: str) -> None:
    # Each version of Landlock supports more rights. Seccomp rejects the operations whose rights are missing: emptying a
    # file that is open for reading (before 3), connections (before 4), signals (before 6).
    # Without REFER (1 << 13), the kernel denies links and renames between folders.
    known = sum(rights for first, rights in RIGHTS.items() if first <= version)

    # The second field is for TCP (bind, connect), the third for abstract Unix sockets and signals. A kernel rejects
    # bits that it does not support, so an older kernel gets a shorter struct.
    rules = struct.pack("QQQ", known, 3, 3)
    size = max((size for first, size in SIZES.items() if first <= version), default=0)
    ruleset = _call(libc.syscall(LANDLOCK_CREATE, rules, ctypes.c_size_t(size), 0), "landlock")

    rights = {
        **dict.fromkeys(paths, READ | LIST),
        **dict.fromkeys(DEVICES, READ | WRITE),
        # No folders and links: the supervisor can measure the folder by its list of files.
        folder: WRITE | READ | LIST | DELETE | MAKE | TRUNCATE,
    }
    for path, granted in rights.items():
        with suppress(FileNotFoundError):
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
            # The kernel's struct is packed: 12 bytes without padding.
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
