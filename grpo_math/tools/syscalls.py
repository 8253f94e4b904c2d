"""The system calls that a program may not make, as a seccomp filter: their numbers, and the filter's instructions.

The filter rejects sockets, new processes, starting programs, signals to and control of other processes, namespaces and
mounts, new folders and symbolic links, changes of a file's owner, mode and times, memory and disk space that no limit
counts, calls that keep a closed file or delay another process, and the calls that only administrators need. The numbers
are those of Linux on x86-64 and ARM64; other machines have no filter.

sandbox.py installs the filter.
"""

import errno
import platform
import struct
from typing import NamedTuple

TABLE = """
socket 41 198 | socketpair 53 199 | connect 42 203 | bind 49 200 |
kill 62 129 | tkill 200 130 | tgkill 234 131 | rt_sigqueueinfo 129 138 | rt_tgsigqueueinfo 297 240 |
pidfd_open 434 434 | pidfd_send_signal 424 424 | pidfd_getfd 438 438 |
ptrace 101 117 | process_vm_readv 310 270 | process_vm_writev 311 271 | kcmp 312 272 |
process_madvise 440 440 | process_mrelease 448 448 |
setpriority 141 140 | sched_setaffinity 203 122 | sched_setattr 314 274 | sched_setparam 142 118 |
sched_setscheduler 144 119 | ioprio_set 251 30 | migrate_pages 256 238 | move_pages 279 239 |
execve 59 221 | execveat 322 281 | unshare 272 97 | setns 308 268 |
mount 165 40 | umount2 166 39 | pivot_root 155 41 | chroot 161 51 | open_tree 428 428 | move_mount 429 429 |
fsopen 430 430 | fsconfig 431 431 | fsmount 432 432 | fspick 433 433 | mount_setattr 442 442 |
name_to_handle_at 303 264 | open_by_handle_at 304 265 |
fanotify_init 300 262 | inotify_init 253 - | inotify_init1 294 26 |
chmod 90 - | fchmod 91 52 | fchmodat 268 53 | fchmodat2 452 452 |
chown 92 - | fchown 93 55 | lchown 94 - | fchownat 260 54 |
utime 132 - | utimes 235 - | futimesat 261 - | utimensat 280 88 |
setxattr 188 5 | lsetxattr 189 6 | fsetxattr 190 7 | setxattrat 463 463 |
removexattr 197 14 | lremovexattr 198 15 | fremovexattr 199 16 | removexattrat 466 466 |
mknod 133 - | mknodat 259 33 | mkdir 83 - | mkdirat 258 34 | symlink 88 - | symlinkat 266 36 |
sync 162 81 | syncfs 306 267 | truncate 76 45 | fallocate 285 47 | umask 95 166 | file_setattr 469 469 |
memfd_create 319 279 | memfd_secret 447 447 | shmget 29 194 | shmat 30 196 | shmctl 31 195 |
msgget 68 186 | msgsnd 69 189 | msgrcv 70 188 | msgctl 71 187 | semget 64 190 | semop 65 193 | semctl 66 191 |
mq_open 240 180 | mq_unlink 241 181 | add_key 248 217 | keyctl 250 219 | request_key 249 218 |
sendfile 40 71 | splice 275 76 | io_setup 206 0 |
landlock_create_ruleset 444 444 | landlock_add_rule 445 445 | landlock_restrict_self 446 446 |
bpf 321 280 | perf_event_open 298 241 | userfaultfd 323 282 |
io_uring_setup 425 425 | io_uring_enter 426 426 | io_uring_register 427 427 |
init_module 175 105 | finit_module 313 273 | delete_module 176 106 | kexec_load 246 104 | kexec_file_load 320 294 |
reboot 169 142 | swapon 167 224 | swapoff 168 225 | acct 163 89 | syslog 103 116 | quotactl 179 60 |
quotactl_fd 443 443 | settimeofday 164 170 | clock_settime 227 112 | adjtimex 159 171 | clock_adjtime 305 266 |
sethostname 170 161 | setdomainname 171 162 | iopl 172 - | ioperm 173 - | personality 135 92 | vhangup 153 58
"""
# Column of the table, AUDIT_ARCH of <linux/audit.h>.
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# Higher numbers belong to another interface of the same kernel, and would pass a filter of single numbers.
X32 = 0x40000000

# Calls that are rejected with another error: fork and vfork, which exist only on x86-64, and clone3 and openat2. The
# flags of these two are in memory, which a filter cannot read. After ENOSYS, the C library has a fallback.
OTHER_ERRORS = {(57, -1): errno.EAGAIN, (58, -1): errno.EAGAIN, (435, 435): errno.ENOSYS, (437, 437): errno.ENOSYS}
# Constants of <linux/bpf_common.h>.
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
# Constants of <linux/seccomp.h>.
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data: low halves of arguments.
NUMBER, ARCH, FIRST, SECOND, THIRD = 0, 4, 16, 24, 32


class Step(NamedTuple):
    """An instruction of the filter. ``yes`` and ``no`` are the numbers of next steps that a comparison skips."""

    code: int
    value: int
    yes: int = 0
    no: int = 0


def _not_among(*values: int) -> list[Step]:
    return [Step(EQUAL, value, yes=len(values) - at) for at, value in enumerate(values)]


# O_TRUNC | O_ACCMODE: Landlock before version 3 lets a file be emptied without a right to write.
EMPTIES = 0o1000 | 0o3
# Calls that are rejected depending on one argument. The condition falls through to the next instruction to reject the
# call; a jump of 1 skips that instruction. Each row: numbers of both machines, the argument, the condition, the error.
CONDITIONS: list[tuple[tuple[int, int], int, list[Step], int]] = [
    # clone with any new namespace
    ((56, 220), FIRST, [Step(ANY_BIT, 0x7E020080, no=1)], errno.EPERM),
    # clone without CLONE_THREAD
    ((56, 220), FIRST, [Step(ANY_BIT, 0x00010000, yes=1)], errno.EAGAIN),
    # prlimit of another process
    ((302, 261), FIRST, [Step(EQUAL, 0, yes=1)], errno.EPERM),
    # prctl with PR_SET_PDEATHSIG, and with PR_SET_DUMPABLE, which hides /proc/PID/fd from a supervisor without root
    *(((157, 167), FIRST, [Step(EQUAL, option, no=1)], errno.EPERM) for option in (1, 4)),
    # fcntl, except F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_SETLK, F_SETLKW, F_DUPFD_CLOEXEC,
    # F_SETPIPE_SZ and F_GETPIPE_SZ. Others send signals, delay other processes that open a file (F_SETLEASE), or wait
    # forever with a closed file (F_OFD_SETLKW).
    ((72, 25), SECOND, _not_among(0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031, 1032), errno.EPERM),
    # ioctl, except FIONCLEX, FIOCLEX, FIONBIO and FIONREAD
    ((16, 29), SECOND, _not_among(0x5450, 0x5451, 0x5421, 0x541B), errno.EPERM),
    # open and openat with O_TRUNC for reading, or with the access mode 3
    *(
        (numbers, argument, [Step(AND, EMPTIES), Step(EQUAL, flags, no=1)], errno.EPERM)
        for numbers, argument in (((2, -1), SECOND), ((257, 56), THIRD))
        for flags in (0o1000, 0o1003)
    ),
]


def is_supported() -> bool:
    """Return True if there is a filter for this machine."""
    return platform.machine() in MACHINES and struct.calcsize("P") == 8


def program() -> bytes:
    """Return the instructions of the filter, 8 bytes each."""
    column, arch = MACHINES[platform.machine()]
    # Another architecture has other numbers (32-bit calls on x86-64), so its calls end the program.
    rules = [Step(LOAD, ARCH), Step(EQUAL, arch, yes=1), Step(RETURN, KILL), Step(LOAD, NUMBER)]
    rules += [Step(AT_LEAST, X32, no=1), Step(RETURN, KILL)] if column == 0 else []
    # A call that a machine lacks has the number -1 here, which no call has.
    refused = [(int(row.split()[1 + column].replace("-", "-1")), errno.EPERM) for row in TABLE.split("|")]
    refused += [(numbers[column], error) for numbers, error in OTHER_ERRORS.items()]
    # Each rule returns at once: a jump has 8 bits, too few to reach a shared end of the filter.
    for number, error in refused:
        rules += [Step(EQUAL, number & 0xFFFFFFFF, no=1), Step(RETURN, ERRNO | error)]
    for numbers, argument, condition, error in CONDITIONS:
        # Loading an argument overwrites the number, so the number is loaded again for the rules that follow.
        test = [Step(LOAD, argument), *condition, Step(RETURN, ERRNO | error), Step(LOAD, NUMBER)]
        rules += [Step(EQUAL, numbers[column] & 0xFFFFFFFF, no=len(test)), *test]
    rules.append(Step(RETURN, ALLOW))
    return b"".join(struct.pack("HBBI", rule.code, rule.yes, rule.no, rule.value) for rule in rules)
