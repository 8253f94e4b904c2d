"""Faults that take minutes, on the real SLURM of this folder: `tests/cluster/run.sh --long`.

pytest does not collect this file by itself. docs/scaling.md says what the last run showed.
"""

import pytest
from slurm_cluster import wait_for
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


@pytest.mark.skipif(not VLLM, reason="GRPO_MATH_VLLM names no vllm: tests/vllm_environment.sh")
def test_the_last_node_runs_a_real_vllm_server(submit, smollm):
    settings = ["--model_name_or_path", smollm, "--use_vllm", "true", "--vllm_mode", "server", "--max_steps", "3"]
    settings += ["--vllm_max_model_length", "256", "--save_steps", "3", "--vllm_server_timeout", "600"]
    job = submit("multi_node", "cpu", *settings, nodes=2, GRPO_MATH_VLLM=VLLM, **CPU)
    job.ended("COMPLETED")
    assert job.steps() == 3
