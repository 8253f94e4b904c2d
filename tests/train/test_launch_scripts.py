"""launch/train.sh and the sbatch scripts, with stand-ins for the commands that they call.

Those for srun and scontrol start what SLURM would start on its nodes. How a job ends and comes back is tested on a real
SLURM (tests/cluster).
"""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, variables, write_program
from waiting import until

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


@pytest.fixture
def cluster(tmp_path):
    """The variables of a job whose two nodes, with a GPU each, are this machine; its commands are stand-ins."""
    stand_ins = {
        "commands/srun": SRUN,
        "commands/scontrol": SCONTROL,
        "commands/python": f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n',
        "commands/grpo-math": f'#!/usr/bin/env bash\nexec "{sys.executable}" -m grpo_math.cli "$@"\n',
        # In a folder of its own: the launcher asks a python beside it for the version.
        "served/vllm": SERVER,
    }
    for name, text in stand_ins.items():
        write_program(tmp_path / name, text)
    # The job's number decides its port; the scripts go to the folder where sbatch was called.
    for name in ("accelerate_configs", "deepspeed", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "x").touch()
    return variables(
        PATH=f"{tmp_path}/commands{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests/processes")]),
        GRPO_MATH_VLLM=str(tmp_path / "served/vllm"),
        CALLS=str(tmp_path / "calls"),
        SLURM_SUBMIT_DIR=str(tmp_path),
        # Random: two tests at the same time are unlikely to get a port of this job.
        SLURM_JOB_ID=str(secrets.randbelow(4000)),
        SLURM_JOB_NAME="test",
        SLURM_JOB_NODELIST="127.0.0.1,localhost",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="1",
        SLURMD_NODENAME="localhost",
    )


def submit(script, cluster, *arguments, ends=0):
    """Return the calls of a job that ends with this code, after what SLURM does once the nodes are there."""
    log = Path(cluster["CALLS"]).with_name("log")
    with log.open("w") as output:
        code = subprocess.call(
            ["bash", str(ROOT / f"launch/slurm/{script}.sbatch"), *arguments],
            env=cluster,
            stdout=output,
            stderr=output,
            start_new_session=True,
            timeout=120,
        )
    assert code == ends, log.read_text()
    return Path(cluster["CALLS"]).read_text().splitlines()


@pytest.mark.parametrize(
    ("words", "before"), [(["--num_processes", "4", "--", "--seed", "1"], "--num_processes 4 "), (["--seed", "1"], "")]
)
def test_train_gives_accelerate_what_stands_before_the_dashes_and_the_recipe_the_rest(words, before, cluster, tmp_path):
    (tmp_path / "commands/python").write_text('#!/usr/bin/env bash\necho "python $*"\n')
    expected = (
        f"python -m grpo_math.train.ranks --config_file accelerate_configs/cpu.yaml {before}-m grpo_math.train "
        "--config demo_cpu --seed 1"
    )
    launched = subprocess.check_output(
        [ROOT / "launch/train.sh", "demo_cpu", "accelerate_configs/cpu.yaml", *words], env=cluster, text=True
    ).splitlines()
    assert launched == [expected]


# As YAML lets one write it.
SERVED = 'model_name_or_path: "someone/model"\nuse_peft: yes\nuse_vllm: yes\nvllm_mode: "server"\n'
RIGHT = ["recipe.yaml", "x"]


@pytest.mark.parametrize(
    ("script", "arguments", "job", "line"),
    [
        ("train.sh", [], {}, "error: two arguments are needed: RECIPE.yaml ACCELERATE.yaml"),
        ("train.sh", ["nowhere.yaml", "x"], {}, "error: recipe=nowhere.yaml is not a file"),
        ("train.sh", ["demo_cpu", "zero2"], {}, "error: config=zero2 is not a file"),
        ("slurm/one_node.sbatch", ["recipe.yaml"], {}, "error: two arguments are needed"),
        ("slurm/multi_node.sbatch", ["recipe.yaml"], {}, "error: two arguments are needed"),
        (
            "slurm/one_node.sbatch",
            RIGHT,
            {"VLLM_GPUS": "2"},
            "error: VLLM_GPUS=2 leaves no GPU of 2 to train: give 1 to 1",
        ),
        ("slurm/one_node.sbatch", RIGHT, {"VLLM_GPUS": "two"}, "error: VLLM_GPUS=two leaves no GPU"),
        ("slurm/multi_node.sbatch", RIGHT, {"SLURM_NNODES": "1"}, "error: nodes=1 leaves none to train"),
        *(
            (f"slurm/{name}.sbatch", RIGHT, {"SLURM_SUBMIT_DIR": ""}, "error: this script needs a job: sbatch launch/")
            for name in ("one_node", "multi_node")
        ),
    ],
)
def test_wrong_arguments_are_one_line(script, arguments, job, line, cluster, tmp_path):
    (tmp_path / "recipe.yaml").write_text(SERVED)
    environment = {**cluster, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1", **job}
    command = ["bash", str(ROOT / "launch" / script), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert ended.stderr.startswith(line)


@pytest.mark.slow
def test_a_launch_without_deepspeed_is_one_line(cluster, tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")
    path = f"{tmp_path / 'hidden'}{os.pathsep}{cluster.get('PYTHONPATH', '')}"
    command = [ROOT / "launch/train.sh", "demo_cpu", "accelerate_configs/zero2.yaml"]
    environment = {**cluster, "PYTHONPATH": path}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith('error: DeepSpeed needs deepspeed, which is not installed: pip install "deepspeed')
    assert ended.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_server_gets_the_last_node_and_does_not_outlive_the_training(cluster, tmp_path):
    (tmp_path / "recipe.yaml").write_text(SERVED)
    (tmp_path / "commands/python").write_text(f'#!/usr/bin/env bash\necho "python $*" >>"$CALLS"\n{UNTIL_SERVED}')
    job = {**cluster, "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "a,b,c", "SLURM_CPUS_PER_TASK": "8"}
    output, port = submit("multi_node", job, "recipe.yaml", "x"), 20000 + 3 * int(cluster["SLURM_JOB_ID"])
    server = Path(f"{cluster['CALLS']}.server").read_text().strip()
    until(lambda: not Path(f"/proc/{server}").exists())
    step = "srun --nodes=1 --ntasks=1 --nodelist=c --cpus-per-task=8 --export=ALL grpo-math serve "
    assert any(line.startswith(step) for line in output)
    (serve,) = (line for line in output if line.startswith("vllm "))
    assert serve.startswith(f"vllm serve someone/model --host 0.0.0.0 --port {port + 1} ")
    assert "--enable-lora" in serve
    assert "key 32" in output
    train = [line for line in output if line.startswith("python -m grpo_math.train.ranks --config_file x")]
    for rank, line in zip(range(2), sorted(train), strict=True):
        assert f"--machine_rank {rank} --num_machines 2 --num_processes 2 --main_process_ip a" in line
        assert f"--main_process_port {port} " in line
        assert f"--vllm_server_base_url http://c:{port + 1}" in line


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "whole weights, which have a port of their own"])
def test_on_a_single_node_server_and_policy_get_gpus_of_their_own(adapter, cluster, tmp_path):
    (tmp_path / "recipe.yaml").write_text(SERVED if adapter else SERVED.replace("use_peft: yes", "use_peft: no"))
    for name, others in (("commands/python", UNTIL_SERVED), ("served/vllm", 'echo >"$CALLS.server"\nsleep 60\n')):
        (tmp_path / name).write_text(
            f'#!/usr/bin/env bash\necho "{Path(name).name} on $CUDA_VISIBLE_DEVICES: $*" >>"$CALLS"\n{others}'
        )
    job = {"SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "4,5,6,7", "VLLM_GPUS": "2"}
    output = submit("one_node", {**cluster, **job}, "recipe.yaml", "x")
    train, serve = sorted(line for line in output if line.startswith(("python", "vllm")))
    assert serve.startswith("vllm on 4,5: serve someone/model --host 127.0.0.1 ")
    assert train.startswith("python on 6,7: ")
    assert "--num_processes 2 " in train
    port = f"--vllm_group_port {20000 + 3 * int(cluster['SLURM_JOB_ID']) + 2}"
    assert ("--vllm_group_port" in train) == (port in train) == (not adapter)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["one_node", "multi_node"])
def test_a_server_that_ends_stops_training_and_the_job_is_queued_again_once(script, cluster, tmp_path):
    (tmp_path / "recipe.yaml").write_text(SERVED)
    write_program(tmp_path / "served/vllm", '#!/usr/bin/env bash\necho >"$CALLS.server"\nexit 3\n')
    train = f"#!/usr/bin/env bash\ntrap 'kill %1; exit 75' USR1\n{UNTIL_SERVED}sleep 600 &\nwait\n"
    (tmp_path / "commands/python").write_text(train)
    (tmp_path / "commands/scontrol").write_text(f'{SCONTROL}echo "scontrol $*" >>"$CALLS"\n')
    gpus = {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    for _ in range(2):
        calls = submit(script, {**cluster, **gpus}, "recipe.yaml", "x", ends=69)
    assert calls.count(f"scontrol requeue {cluster['SLURM_JOB_ID']}") == 1
    assert "error: two attempts ended at the same step" in (tmp_path / "log").read_text()
