"""The calls of the kernel that a program may not make, as a seccomp filter: numbers, and the filter's instructions.

What is refused: sockets, signals to others, looking into or steering other processes, starting programs, new
namespaces and mounts, changing files' owners, modes and times, memory that no limit counts, and what only a system's
administrator needs. The numbers are those of Linux on x86-64 and ARM64; on another machine there is no filter.

Does not install a filter: confine.py does.
"""

import errno
import platform
import struct

TABLE = """
socket 41 198 | socketpair 53 199 | connect 42 203 | bind 49 200
kill 62 129 | tkill 200 130 | tgkill 234 131 | rt_sigqueueinfo 129 138 | rt_tgsigqueueinfo 297 240
pidfd_open 434 434 | pidfd_send_signal 424 424 | pidfd_getfd 438 438
ptrace 101 117 | process_vm_readv 310 270 | process_vm_writev 311 271 | kcmp 312 272
process_madvise 440 440 | process_mrelease 448 448
setpriority 141 140 | sched_setaffinity 203 122 | sched_setattr 314 274 | sched_setparam 142 118
sched_setscheduler 144 119 | ioprio_set 251 30 | migrate_pages 256 238 | move_pages 279 239
execve 59 221 | execveat 322 281 | unshare 272 97 | setns 308 268
mount 165 40 | umount2 166 39 | pivot_root 155 41 | chroot 161 51 | open_tree 428 428 | move_mount 429 429
fsopen 430 430 | fsconfig 431 431 | fsmount 432 432 | fspick 433 433 | mount_setattr 442 442
name_to_handle_at 303 264 | open_by_handle_at 304 265
fanotify_init 300 262 | inotify_init 253 - | inotify_init1 294 26
chmod 90 - | fchmod 91 52 | fchmodat 268 53 | fchmodat2 452 452
chown 92 - | fchown 93 55 | lchown 94 - | fchownat 260 54
utime 132 - | utimes 235 - | futimesat 261 - | utimensat 280 88
setxattr 188 5 | lsetxattr 189 6 | fsetxattr 190 7 | setxattrat 463 463
removexattr 197 14 | lremovexattr 198 15 | fremovexattr 199 16 | removexattrat 466 466
mknod 133 - | mknodat 259 33
sync 162 81 | syncfs 306 267 | truncate 76 45
memfd_create 319 279 | memfd_secret 447 447 | shmget 29 194 | shmat 30 196 | shmctl 31 195
msgget 68 186 | msgsnd 69 189 | msgrcv 70 188 | msgctl 71 187 | semget 64 190 | semop 65 193 | semctl 66 191
mq_open 240 180 | mq_unlink 241 181 | add_key 248 217 | keyctl 250 219 | request_key 249 218
bpf 321 280 | perf_event_open 298 241 | userfaultfd 323 282
io_uring_setup 425 425 | io_uring_enter 426 426 | io_uring_register 427 427
init_module 175 105 | finit_module 313 273 | delete_module 176 106 | kexec_load 246 104 | kexec_file_load 320 294
reboot 169 142 | swapon 167 224 | swapoff 168 225 | acct 163 89 | syslog 103 116 | quotactl 179 60
quotactl_fd 443 443 | settimeofday 164 170 | clock_settime 227 112 | adjtimex 159 171 | clock_adjtime 305 266
sethostname 170 161 | setdomainname 171 162 | iopl 172 - | ioperm 173 - | personality 135 92 | vhangup 153 58
"""
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, AUDIT_ARCH of <linux/audit.h>
CLONE, CLONE3 = (56, 220), (435, 435)
FORKS = (57, 58)  # on x86-64 alone: fork and vfork
PRLIMIT, PRCTL, FCNTL, IOCTL = (302, 261), (157, 167), (72, 25), (16, 29)
X32 = 0x40000000  # numbers from here on are those of another way into the same kernel

CLONE_THREAD, CLONE_NEW = 0x00010000, 0x7E020080  # a thread; any new namespace
PR_SET_PDEATHSIG = 1
TO_OTHERS = {FCNTL: (8, 10, 15), IOCTL: (0x8901, 0x8902)}  # F_SETOWN and the like: whom a file's signals go to
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of <linux/bpf_common.h>
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000  # of <linux/seccomp.h>
NUMBER, ARCH, FIRST, SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data: low halves of two arguments
Filter = list[tuple[int, int, int, int]]  # code, jump if true, jump if false, value


def machine() -> int | None:
    """The table's column for this machine; None where it has none."""
    found = MACHINES.get(platform.machine())
    return found[0] if found and struct.calcsize("P") == 8 else None


def program(column: int, alone: bool, children: bool) -> bytes:
    """The filter for a program that is alone in its process, may have threads, or may have ``children`` too.

    >>> len(program(0, True, False)) % 8, program(0, True, False) == program(0, False, True)
    (0, False)
    """
    arch = next(arch for at, arch in MACHINES.values() if at == column)
    rules: Filter = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    rules += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)] if column == 0 else []
    for row in TABLE.replace("|", "\n").split("\n"):
        if row.strip() and (number := row.split()[1 + column]) != "-":
            rules += _refused(int(number), errno.EPERM)
    if column == 0 and not children:
        for fork in FORKS:
            rules += _refused(fork, errno.EAGAIN)
    clone = CLONE[column]
    if alone:
        rules += _refused(clone, errno.EAGAIN)
    else:
        rules += _refused_if(clone, [(ANY_BIT, 0, 1, CLONE_NEW)], errno.EPERM)
        rules += [] if children else _refused_if(clone, [(ANY_BIT, 1, 0, CLONE_THREAD)], errno.EAGAIN)
    rules += _refused(CLONE3[column], errno.ENOSYS)  # the C library then takes clone, whose flags can be seen
    rules += _refused_if(PRLIMIT[column], [(EQUAL, 1, 0, 0)], errno.EPERM)  # of another process
    rules += _refused_if(PRCTL[column], [(EQUAL, 0, 1, PR_SET_PDEATHSIG)], errno.EPERM)
    for call, commands in TO_OTHERS.items():
        for command in commands:
            rules += _refused_if(call[column], [(EQUAL, 0, 1, command)], errno.EPERM, SECOND)
    rules.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


def _refused(number: int, error: int) -> Filter:
    return [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | error)]


def _refused_if(number: int, condition: Filter, error: int, argument: int = FIRST) -> Filter:
    """Refused where the condition on an argument goes on to the next instruction."""
    test = [(LOAD, 0, 0, argument), *condition, (RETURN, 0, 0, ERRNO | error), (LOAD, 0, 0, NUMBER)]
    return [(EQUAL, 0, len(test), number), *test]
