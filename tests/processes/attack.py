# Runs inside the Python tool: tries to get out of the sandbox, and prints how many attempts of each kind succeeded.
# tests/tools/test_python.py fills in the facts and reads the counts.
import ctypes
import fcntl
import json
import mmap
import os
import resource
import socket

facts = json.loads("FACTS")
pid, secret = facts["pid"], facts["secret"]
libc = ctypes.CDLL(None, use_errno=True)


def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as client:
        client.settimeout(2)
        client.sendto(b"x", address) if kind == socket.SOCK_DGRAM else client.connect(address)


def write(path):
    with open(path, "x"):
        os.unlink(path)


def fork():
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


def attach():
    assert libc.ptrace(0x4206, pid, 0, 0) == 0


here = ("127.0.0.1", facts["port"])
attempts = {
    "network": [
        lambda: connect(socket.AF_INET, here),
        lambda: connect(socket.AF_UNIX, facts["name"]),
        lambda: connect(socket.AF_INET, here, socket.SOCK_DGRAM),
    ],
    "files": [
        lambda: open(secret).close(),
        lambda: write(os.path.join(os.path.dirname(secret), "written")),
        lambda: write(facts["shared"]),
        lambda: os.truncate(secret, 0),
        lambda: os.chmod(secret, 0o600),
        lambda: os.listdir(os.path.dirname(secret)),
        lambda: open("/etc/passwd").close(),
        lambda: os.close(os.open(secret, os.O_RDONLY | os.O_TRUNC)),
    ],
    "processes": [fork],
    # In a fork of pytest, a bytearray may get addresses that pytest has freed. A mapping always needs new ones.
    "memory": [lambda: mmap.mmap(-1, facts["memory"])],
    "trainer": [
        lambda: open(f"/proc/{pid}/environ").close(),
        lambda: open(f"/proc/{pid}/mem").close(),
        lambda: open(f"/proc/{pid}/cmdline").close(),
        lambda: next(iter(os.environ)),
        attach,
    ],
    "signals": [
        lambda: os.kill(pid, 0),
        lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        lambda: fcntl.fcntl(1, fcntl.F_SETOWN, pid),
    ],
}
succeeded = dict.fromkeys(attempts, 0)
for kind, calls in attempts.items():
    for call in calls:
        try:
            call()
            succeeded[kind] += 1
        except BaseException:
            pass
print(json.dumps(succeeded))
