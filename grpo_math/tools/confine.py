"""The walls around a program: namespaces and a root of its own, limits, Landlock, seccomp; each by the kernel's calls.

`separate` is for the parent of a program, `wall_in` for the program's own process, which can't be undone there. A
layer that `available` has found is put up or raises `OSError`: no program runs with less than was said.

Does not run a program, and does not say what holds: server.py and walls.py do.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_math.tools import syscalls

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x1000, 0x4000, 0x40000, 2, 4
MNT_DETACH, AT_RECURSIVE, ATTR_LOCKED = 2, 0x8000, 0x1 | 0x2 | 0x4  # read-only, no suid, no devices
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446
CAPSET, CAPABILITIES_3 = {"x86_64": 126, "aarch64": 91}, 0x20080522
ROOT = "/proc"  # where the new root is put together: a folder that every system has, and that nothing comes from
FOLDER, FOLDER_MB, FILES = "/tmp", 64, 1024  # of a program: where it starts, all that it can write
DEVICES = ("/dev/null", "/dev/urandom")
OPEN_FILES = 64
STRANGER = 1_879_048_192  # a program of root's runs as this user number plus its process's: nobody else's

libc = ctypes.CDLL(None, use_errno=True)


def called(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def available(paths: Sequence[str], without: Sequence[str] = ()) -> dict[str, Any]:
    """The layers that this process can put up: namespaces ("system", "user" or ""), Landlock's version, seccomp, and
    where this is root, another user for the program."""
    kinds = () if "spaces" in without else ("system", "user") if os.geteuid() == 0 else ("user",)
    spaces = next((kind for kind in kinds if _works(lambda kind=kind: separate(kind, paths))), "")  # type: ignore[misc]
    version = 0 if "landlock" in without else libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    seccomp = "seccomp" not in without and _works(lambda: forbid(True, False))
    stranger = os.geteuid() == 0 and spaces != "user" and _works(lambda: _as_stranger(spaces, paths))
    return {"spaces": spaces, "landlock": max(version, 0), "seccomp": seccomp, "stranger": stranger}


def _as_stranger(spaces: str, paths: Sequence[str]) -> None:
    """Root's program as another user: it may have to do without, where only root can come to the interpreter."""
    if spaces:
        separate(spaces, paths)
    _become(STRANGER, FOLDER)
    for path in paths:
        os.listdir(path)


def _works(attempt: Callable[[], Any]) -> bool:
    """Does it, in a child?"""
    pid = os.fork()
    if pid == 0:
        try:
            libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            attempt()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def separate(spaces: str, paths: Sequence[str]) -> None:
    """Namespaces of its own for this process and its children: network, files, processes (of children), messages.

    The files are those of ``paths``, read-only, and an empty folder; ``spaces`` as `available` names them."""
    uid, gid = os.geteuid(), os.getegid()
    user = NEWUSER if spaces == "user" else 0
    called(libc.unshare(user | NEWNS | NEWNET | NEWIPC | NEWUTS | NEWPID), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount("none", "/", MS_REC | MS_PRIVATE)
    _mount("tmpfs", ROOT, MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for folder in ("/dev", FOLDER):
        os.makedirs(ROOT + folder)
    for device in DEVICES:
        Path(ROOT + device).touch()
    for path in paths:
        _show(path)
    attributes = struct.pack("QQQQ", ATTR_LOCKED, 0, 0, 0)
    locked = libc.syscall(MOUNT_SETATTR, -100, ROOT.encode(), AT_RECURSIVE, attributes, ctypes.c_size_t(32))
    called(locked, "mount_setattr")
    for device in DEVICES:
        _mount(device, ROOT + device, MS_BIND)
    _mount("tmpfs", ROOT + FOLDER, MS_NOSUID | MS_NODEV, f"size={FOLDER_MB}m,nr_inodes={FILES},mode=777")
    os.chdir(ROOT)
    called(libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    called(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir(FOLDER)


def _show(path: str) -> None:
    """A folder of the system at its own place in the new root; a link stays one."""
    target = Path(ROOT + path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(path):
        target.symlink_to(os.readlink(path))
    else:
        target.mkdir(exist_ok=True)
        _mount(path, str(target), MS_BIND | MS_REC)


def _mount(source: str, target: str, flags: int, options: str = "") -> None:
    kind = source.encode() if options else None
    found = libc.mount(source.encode(), target.encode(), kind, ctypes.c_ulong(flags), options.encode() or None)
    called(found, f"mount {target}")


def wall_in(layers: dict[str, Any], limits: dict[str, Any], paths: Sequence[str], folder: str) -> None:
    """Limits, another user where this is root, no rights, Landlock, seccomp, in this order."""
    spaces, processes = layers["spaces"], limits["processes"]
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FOLDER_MB << 20,) * 2)
    os.chdir(folder)
    if layers["stranger"]:
        _become(limits["user"], folder)
    if spaces or processes == 1 or layers["stranger"]:  # else the kernel would count the user's other processes too
        most = processes + (spaces == "user")  # the parent is in the same user namespace
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    called(libc.syscall(CAPSET[platform.machine()], struct.pack("Ii", CAPABILITIES_3, 0), bytes(24)), "capset")
    called(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    called(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if layers["landlock"]:
        _landlock(layers["landlock"], paths, folder)
    memory = limits["held"] + (limits["memory_mb"] << 20)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if layers["seccomp"]:
        forbid(alone=processes == 1, children=bool(spaces))


def _become(number: int, folder: str) -> None:
    if folder != FOLDER:
        os.chown(folder, number, number)
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


# Rights of <linux/landlock.h>
EXECUTE, WRITE, READ, LIST, FILES_OF_FOLDER = 1, 2, 4, 8, 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12
REFER, TRUNCATE, IOCTL = 1 << 13, 1 << 14, 1 << 15
PATH_BENEATH = 1


def _landlock(version: int, paths: Sequence[str], folder: str) -> None:
    """Files: ``paths`` can be read, ``folder`` also written; TCP, and signals to others: not at all."""
    known = (1 << 13) - 1 | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    known |= IOCTL if version >= 5 else 0
    rules = struct.pack("QQQ", known, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = called(libc.syscall(LANDLOCK_CREATE, rules, ctypes.c_size_t(size), 0), "landlock")
    inside = WRITE | READ | LIST | FILES_OF_FOLDER | REFER | TRUNCATE
    for path, rights in [
        *((path, READ | LIST) for path in paths),
        *((d, READ | WRITE) for d in DEVICES),
        (folder, inside),
    ]:
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", rights & known, fd)
            called(libc.syscall(LANDLOCK_ADD, ruleset, PATH_BENEATH, rule, 0), "landlock")
            os.close(fd)
    called(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def forbid(alone: bool, children: bool) -> None:
    """The seccomp filter, for good."""
    column = syscalls.machine()
    if column is None:
        raise OSError("no filter for this machine")
    code = syscalls.program(column, alone, children)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    called(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter, 0, 0), "seccomp")
