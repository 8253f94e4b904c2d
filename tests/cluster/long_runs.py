"""Faults that take minutes, on the real SLURM of this folder: `tests/cluster/run.sh --long`.

pytest does not collect this file by itself. docs/clusters.md says what the last run showed.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from slurm_cluster import NODES, wait_for
from vllm_process import CPU, VLLM


def test_a_job_whose_time_is_up_saves_and_comes_back(submit, cluster):
    """SLURM counts the time of a job in minutes."""
    job = submit("multi_node", "multi_node", "--max_steps", "100", nodes=2, options=["--time=2", "--signal=B:USR1@60"])
    job.wait_for_step(1)
    cluster.start_again(job.number)
    assert "stopping after this step, with a checkpoint" in job.log
    before = job.steps()
    assert 0 < before < 100
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=10")
    job.ended("COMPLETED", restarts=1)
    assert job.steps() == 100


@pytest.mark.parametrize("nodes", [2, 1])
def test_a_run_that_is_cancelled_while_it_saves_goes_on_with_two_nodes_or_one(nodes, submit, cluster, undisturbed):
    settings = ["--prompts_per_step", "2"] if nodes == 1 else []
    job = submit("multi_node", "multi_node", *settings, nodes=2)
    wait_for(lambda: list(job.run.glob("checkpoint-*")), "a checkpoint is being written", 240)
    cluster.run("scancel", job.number)
    job.ended("CANCELLED")
    submit("multi_node", "multi_node", *settings, "--output_dir", str(job.run), nodes=nodes).ended("COMPLETED")
    assert job.steps() == 12
    assert nodes == 1 or job.weights() == undisturbed("multi_node")


LINK = ("ip", "link", "set", "to-n2")


@pytest.mark.parametrize(
    ("lose", "return_"),
    [
        (lambda cluster: cluster.run(*LINK, "down"), lambda cluster: cluster.run(*LINK, "up")),
        (lambda cluster: cluster.power_off("n2"), lambda cluster: cluster.power_on("n2")),
    ],
    ids=["its link", "its power"],
)
def test_a_node_that_loses_its_link_or_its_power_ends_the_attempt_and_the_job_comes_back(
    lose, return_, submit, cluster, undisturbed
):
    job = submit("multi_node", "multi_node", nodes=2)
    job.wait_for_step(5)
    lose(cluster)
    try:
        wait_for(lambda: cluster.job(job.number)["JobState"] != "RUNNING", "the attempt ends", 900)
    finally:
        return_(cluster)
    cluster.start_again(job.number)
    job.ended("COMPLETED", restarts=1)
    assert job.steps() == 12
    assert job.weights() == undisturbed("multi_node")


def test_the_commands_by_hand_on_both_nodes_need_no_slurm(cluster, folder, environment, undisturbed):
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", "accelerate_configs/multi_node.yaml"]
    command += ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "n1", "--machine_rank"]
    training = ["-m", "grpo_math.train", "--config", "recipe.yaml", "--output_dir", "by_hand"]
    started = []
    for rank, node in enumerate(NODES):
        named = ["unshare", "--uts", "sh", "-c", f'hostname {node}; exec "$@"', "sh"]
        inside = ["ip", "netns", "exec", cluster.name + node, *named, *command, str(rank), *training]
        started.append(subprocess.Popen(inside, cwd=folder, env=environment))
    assert [process.wait(timeout=600) for process in started] == [0, 0]
    assert (folder / "by_hand/adapter/adapter_model.safetensors").read_bytes() == undisturbed("multi_node")


@pytest.mark.skipif(not VLLM, reason="GRPO_MATH_VLLM names no vllm: ./launch/vllm_environment.sh")
def test_the_last_node_runs_a_real_vllm_server(submit, smollm):
    settings = ["--model_name_or_path", smollm, "--use_vllm", "true", "--vllm_mode", "server", "--max_steps", "3"]
    settings += ["--vllm_max_model_length", "256", "--save_steps", "3", "--vllm_server_timeout", "600"]
    job = submit("multi_node", "cpu", *settings, nodes=2, GRPO_MATH_VLLM=VLLM, **CPU)
    job.ended("COMPLETED")
    assert job.steps() == 3
