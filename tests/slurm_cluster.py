"""A real SLURM on this machine: a controller and two nodes, each in a network and a set of process ids of its own.

Needs root and the packages `slurm-wlm` and `munge`. All files, the authentication key included, lie in one folder, and
the controller has its own network too: several clusters run side by side, and nothing else of the machine changes.

    network of the controller     bridge 10.77.0.254
    network of node n1, n2        10.77.0.1, 10.77.0.2, with names in /etc/netns/NAME/hosts

Does not limit memory or CPUs (no cgroups), and its GPUs are names.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from waiting import descendants, until

NODES = ("n1", "n2")
PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "unshare")

CONFIG = """\
ClusterName=test
SlurmctldHost=ctl(10.77.0.254)
AuthType=auth/munge
AuthInfo=socket=FOLDER/munge/socket
SlurmUser=root
StateSaveLocation=FOLDER/state
SlurmdSpoolDir=FOLDER/spool-%n
SlurmctldPidFile=FOLDER/slurmctld.pid
SlurmdPidFile=FOLDER/slurmd-%n.pid
SlurmctldLogFile=FOLDER/slurmctld.log
SlurmdLogFile=FOLDER/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,batch_sched_delay=0
KillWait=30
NodeName=n1 NodeAddr=10.77.0.1 CPUs=2 RealMemory=8000 Gres=gpu:1 State=UNKNOWN
NodeName=n2 NodeAddr=10.77.0.2 CPUs=2 RealMemory=8000 Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10
"""
FILES = {
    "slurm.conf": CONFIG,
    "gres.conf": "NodeName=n[1-2] Name=gpu File=/dev/zero\n",
    "cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n",
}

# A network for the controller and for each node, joined by a bridge.
NETWORK = """\
for node in "" n1 n2; do
    mkdir -p "/etc/netns/{name}$node"
    cat >"/etc/netns/{name}$node/hosts" <<END
127.0.0.1 localhost
10.77.0.1 n1
10.77.0.2 n2
10.77.0.254 ctl munged
END
    ip netns add "{name}$node"
    ip -n "{name}$node" link set lo up
done
ip -n {name} link add bridge type bridge
ip -n {name} addr add 10.77.0.254/24 dev bridge
ip -n {name} link set bridge up
for number in 1 2; do
    ip -n {name} link add "to-n$number" type veth peer name eth0 netns "{name}n$number"
    ip -n {name} link set "to-n$number" master bridge
    ip -n "{name}n$number" addr add "10.77.0.$number/24" dev eth0
    ip -n "{name}n$number" link set eth0 up
done
"""


def missing() -> str | None:
    """Return why a cluster cannot be made here, or None."""
    permitted = ["unshare", "--net", "--pid", "--fork", "true"]
    if all(map(shutil.which, PROGRAMS)) and not subprocess.run(permitted, capture_output=True).returncode:
        return None
    return "a SLURM cluster needs root, network namespaces, slurm-wlm, munge and iproute2"


def wait_for(condition: Callable[[], object], case: str, seconds: float = 120) -> None:
    """`until`, at a pace at which SLURM's commands can be called, and with what was waited for in its message."""
    until(condition, seconds, f"{case}: not within {seconds:.0f} s", pause=0.2)


class Cluster:
    """A context in which the cluster runs. ``environment`` is what a user of the cluster has."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.name = f"g{os.getpid()}"
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}  # by the name of a node, or of the program

    def __enter__(self) -> "Cluster":
        try:
            subprocess.run(["bash", "-euc", NETWORK.format(name=self.name)], check=True)
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed([*self.daemons]):
            self._kill(name)
        for network in ("", *NODES):
            subprocess.run(["ip", "netns", "del", self.name + network], capture_output=True)
            shutil.rmtree(f"/etc/netns/{self.name}{network}", ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self, *command: str, node: str = "", check: bool = True, cwd: Path | None = None, **environment: str
    ) -> str:
        """Run a command in the network of the controller or of a node, and return its output."""
        inside = ["ip", "netns", "exec", self.name + node, *command]
        both = {**self.environment, **environment}
        done = subprocess.run(inside, env=both, cwd=cwd, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller says of a job: JobState, Restarts, ExitCode, Reason and more."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def start_again(self, number: str) -> None:
        """Wait until a job is queued again, and have it start soon: SLURM would let it wait for two minutes."""

        # A job that was only just submitted is pending too, and may start before it can be updated.
        def is_queued_again() -> bool:
            job = self.job(number)
            return job["JobState"] == "PENDING" and job["Restarts"] != "0"

        wait_for(is_queued_again, f"job {number} is queued again", 180)
        # Not at once: slurmd has revoked the job's credential, and refuses one of the same second.
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now+3")

    def wait(self, number: str, *states: str, seconds: float = 180) -> dict[str, str]:
        """Wait until a job is in one of these states, and return what the controller says of it then."""
        wait_for(lambda: self.job(number)["JobState"] in states, f"job {number} is {'/'.join(states)}", seconds)
        return self.job(number)

    def processes(self, node: str, words: str) -> list[int]:
        """Return the processes of a node whose command line contains ``words``, as this machine numbers them."""
        pids = []
        for process in descendants(self.daemons[node].pid):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile, or is a zombie
                if words in " ".join(process.cmdline()):
                    pids.append(process.pid)
        return pids

    def power_off(self, node: str) -> None:
        """End a node at once: nothing of it sends a last message, and each of its processes is gone."""
        self.run("ip", "link", "set", f"to-{node}", "down")
        self._kill(node)

    def power_on(self, node: str) -> None:
        self.run("ip", "link", "set", f"to-{node}", "up")
        self._daemon(node, node, "slurmd", "-D", "-N", node)

    def _kill(self, name: str) -> None:
        daemon = self.daemons.pop(name)
        daemon.kill()  # the first process of a set of process ids: the kernel ends the others with it
        daemon.wait()

    def _start(self) -> None:
        munge, key = self.folder / "munge", self.folder / "munge/key"
        for path in (munge, self.folder / "state"):
            path.mkdir()
        self.folder.chmod(0o755)
        munge.chmod(0o755)
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for name, text in FILES.items():
            (self.folder / name).write_text(text.replace("FOLDER", str(self.folder)))
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "log", "pid", "seed")]
        self._daemon("munged", "", "munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        wait_for((munge / "socket").exists, "munged", 20)
        self._daemon("ctl", "", "slurmctld", "-D")
        for node in NODES:
            self.power_on(node)
        wait_for(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).startswith("2"), "2 nodes", 60)

    def _daemon(self, host: str, network: str, *command: str) -> None:
        log = (self.folder / f"{host}.out").open("ab")
        words = ["ip", "netns", "exec", self.name + network, "unshare", "--uts", "--pid", "--fork", "--kill-child"]
        words += ["--mount-proc", "sh", "-c", f'hostname {host}; exec "$@"', "sh", *command]
        started = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self.daemons[host] = started
