"""launch/train.sh and the sbatch scripts, with stand-ins for the commands that they call.

Those for srun and scontrol start what SLURM would start on its nodes. How a job ends and comes back is tested on a real
SLURM (tests/cluster).
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, variables
from waiting import until

from grpo_math.run.machine import port_is_free

SRUN = """#!/usr/bin/env bash
# As many tasks as --ntasks says, one a node, with the variables that SLURM gives each.
echo "srun $*" >>"$CALLS"
set -m # each task is a process group of its own, which SLURM signals as a whole
trap 'kill -KILL $(jobs -p)' TERM # as srun's own: "forcing job termination"
trap 'for task in $(jobs -p); do kill -USR1 -- "-$task"; done' USR1
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && tasks=${1#*=}; shift; done
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i SLURM_NODEID=$i "$@" & done
code=0
for task in $(jobs -p); do
    while kill -0 "$task" 2>/dev/null; do wait "$task" || true; done
    wait "$task" || code=$?
done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$CALLS"
[ "$1 $2" != "show hostnames" ] || tr , '\\n' <<<"$3"
[ "$1" != --oneliner ] || echo "JobId=$4 JobState=RUNNING Reason=None"
"""
SERVER = """#!/usr/bin/env bash
echo "vllm $*" >>"$CALLS"
echo "key ${#VLLM_API_KEY}" >>"$CALLS"
echo $$ >"$CALLS.server"
exec sleep 600
"""

UNTIL_SERVED = 'until [ -e "$CALLS.server" ]; do sleep 0.1; done\n'  # training that waits for the server


def job_number():
    """Return a number whose job finds its two ports free."""
    while True:
        # Random and even: tests that run at the same time are unlikely to get a port of this job.
        number = 2 * secrets.randbelow(5000)
        if port_is_free(20000 + number) and port_is_free(20001 + number):
            return number


@pytest.fixture
def cluster(tmp_path):
    """The variables of a job whose two nodes, with a GPU each, are this machine; its commands are stand-ins."""
    commands = tmp_path / "commands"
    commands.mkdir()
    python = f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n'
    program = f'#!/usr/bin/env bash\nexec "{sys.executable}" -m grpo_math.cli "$@"\n'
    (tmp_path / "served").mkdir()  # in a folder of its own: the launcher asks a python beside it for the version
    stand_ins = {"srun": SRUN, "scontrol": SCONTROL, "../served/vllm": SERVER, "python": python, "grpo-math": program}
    for name, text in stand_ins.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    # The job's number decides its port; the scripts go to the folder where sbatch was called.
    for name in ("accelerate_configs", "deepspeed", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    return variables(
        PATH=f"{commands}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests/processes")]),
        GRPO_MATH_VLLM=str(tmp_path / "served/vllm"),
        CALLS=str(tmp_path / "calls"),
        SLURM_SUBMIT_DIR=str(tmp_path),
        SLURM_JOB_ID=str(job_number()),
        SLURM_JOB_NAME="test",
        SLURM_JOB_NODELIST="127.0.0.1,localhost",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="1",
        SLURMD_NODENAME="localhost",
    )


def submit(script, cluster, *arguments):
    """What SLURM does once the nodes are there. The script's own standard output and error are a file."""
    log = Path(cluster["CALLS"]).with_name("log")
    command = ["bash", str(ROOT / f"launch/slurm/{script}.sbatch"), *arguments]
    return subprocess.Popen(
        command, env=cluster, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True
    ), log


def calls(cluster):
    path = Path(cluster["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def test_train_gives_accelerate_what_stands_before_the_dashes_and_the_recipe_the_rest(cluster, tmp_path):
    (tmp_path / "commands/python").write_text('#!/usr/bin/env bash\necho "python $*"\n')
    expected = "python -m grpo_math.train.ranks --config_file a.yaml {}-m grpo_math.train --config r.yaml --seed 1\n"
    options = (["--num_processes", "4", "--", "--seed", "1"], "--num_processes 4 "), (["--seed", "1"], "")
    for words, before in options:
        command = [str(ROOT / "launch/train.sh"), "r.yaml", "a.yaml", *words]
        assert subprocess.check_output(command, env=cluster, text=True) == expected.format(before)
    done = subprocess.run(command[:1], env=cluster, capture_output=True, text=True)
    assert done.returncode == 2
    assert "./launch/train.sh R" in done.stderr


# As YAML lets one write it.
SERVED = 'model_name_or_path: "someone/model"\nuse_peft: {}\nuse_vllm: yes\nvllm_mode: "server"\n'


@pytest.mark.slow
def test_a_server_gets_the_last_node_and_does_not_outlive_the_training(cluster, tmp_path):
    (tmp_path / "recipe.yaml").write_text(SERVED.format("yes"))
    (tmp_path / "commands/python").write_text(f'#!/usr/bin/env bash\necho "python $*" >>"$CALLS"\n{UNTIL_SERVED}')
    job, log = submit("multi_node", {**cluster, "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "a,b,c"}, "recipe.yaml", "x")
    assert job.wait(60) == 0, log.read_text()
    server = Path(f"{cluster['CALLS']}.server").read_text().strip()
    until(lambda: not Path(f"/proc/{server}").exists())
    output, port = calls(cluster), 20000 + int(cluster["SLURM_JOB_ID"])
    assert any(line.startswith("srun --nodes=1 --ntasks=1 --nodelist=c grpo-math serve ") for line in output)
    (serve,) = (line for line in output if line.startswith("vllm "))
    assert serve.startswith(f"vllm serve someone/model --host 0.0.0.0 --port {port + 1} ")
    assert "--enable-lora" in serve
    assert "key 32" in output
    train = [line for line in output if line.startswith("python -m grpo_math.train.ranks --config_file x")]
    for rank, line in zip(range(2), sorted(train), strict=True):
        assert f"--machine_rank {rank} --num_machines 2 --num_processes 2 --main_process_ip a" in line
        assert f"--main_process_port {port} " in line
        assert f"--vllm_server_base_url http://c:{port + 1}" in line


def test_a_recipe_that_starts_no_server_has_every_node_train(cluster, tmp_path):
    (tmp_path / "recipe.yaml").write_text(SERVED.format("true").replace('"server"', '"colocate"'))
    (tmp_path / "commands/python").write_text('#!/usr/bin/env bash\necho "python $*" >>"$CALLS"\n')
    job, log = submit("multi_node", cluster, "recipe.yaml", "x")
    assert job.wait(60) == 0, log.read_text()
    assert sum(line.startswith("python") for line in calls(cluster)) == 2
    assert not any(line.startswith("vllm") for line in calls(cluster))


@pytest.mark.slow
def test_on_a_single_node_server_and_policy_get_gpus_of_their_own(cluster, tmp_path):
    (tmp_path / "recipe.yaml").write_text(SERVED.format("false"))
    for name, others in (("commands/python", UNTIL_SERVED), ("served/vllm", 'echo >"$CALLS.server"\nsleep 60\n')):
        output = f'echo "{Path(name).name} on $CUDA_VISIBLE_DEVICES: $*" >>"$CALLS"\n'
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{output}{others}")
    job = {"SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "4,5,6,7", "VLLM_GPUS": "2"}
    job, log = submit("one_node", {**cluster, **job}, "recipe.yaml", "x")
    assert job.wait(60) == 0, log.read_text()
    train, serve = sorted(line for line in calls(cluster) if line.startswith(("python", "vllm")))
    assert serve.startswith("vllm on 4,5: serve someone/model --host 127.0.0.1 ")
    assert "--tensor-parallel-size 2" in serve
    assert train.startswith("python on 6,7: ")
    assert "--num_processes 2 " in train


@pytest.mark.slow
def test_a_step_that_takes_too_long_goes_back_into_the_queue_before_the_time_is_up(cluster, tmp_path):
    (tmp_path / "recipe.yaml").write_text("model_name_or_path: someone/model\n")
    (tmp_path / "commands/python").write_text('#!/usr/bin/env bash\ntrap "" USR1\necho python >>"$CALLS"\nsleep 60\n')
    (tmp_path / "commands/sleep").write_text(
        '#!/usr/bin/env bash\necho "sleep $*" >>"$CALLS"\n[ "$1" = 570 ] || exec /bin/sleep "$@"\n'
    )
    (tmp_path / "commands/sleep").chmod(0o755)
    job, _ = submit("one_node", cluster, "recipe.yaml", "x")
    until(lambda: "python" in calls(cluster))
    job.send_signal(signal.SIGUSR1)
    until(lambda: f"scontrol requeue {cluster['SLURM_JOB_ID']}" in calls(cluster))
    assert "sleep 570" in calls(cluster)
    os.killpg(job.pid, signal.SIGKILL)  # as SLURM ends the job that it requeues
    job.wait()
