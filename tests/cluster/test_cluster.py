"""The sbatch scripts on a real SLURM of two nodes: what is printed, how jobs end, and that no weights change.

A fault comes after the second step. The weights at the end are those of a run of two processes on one machine that
nothing interrupts.
"""

import os
import signal

import pytest
from slurm_cluster import wait_for

pytestmark = pytest.mark.full


# Both scripts end a job by job.sh, so each fault is tried with one of them.


def test_a_job_that_is_preempted_saves_and_comes_back_once(submit, cluster, folder, undisturbed):
    job = submit("multi_node", "multi_node", nodes=2)
    job.wait_for_step(2)
    options = ["--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 5"]
    cluster.wait(cluster.run("sbatch", "--parsable", *options, cwd=folder), "COMPLETED")
    cluster.start_again(job.number)
    job.ended("COMPLETED", restarts=1)
    assert "SIGTERM: stopping after this step, with a checkpoint" in job.log
    assert "2 CPU processes" in job.log
    assert job.steps() == 12
    assert job.weights() == undisturbed("multi_node")


def test_scancel_saves_and_ends_the_job_for_good_and_another_job_goes_on(submit, cluster):
    job = submit("one_node", "cpu", nodes=1)
    job.wait_for_step(2)
    cluster.run("scancel", job.number)
    wait_for(lambda: cluster.run("squeue", "-h") == "", "an empty queue", 120)
    job.ended("CANCELLED")
    assert "stopping after this step, with a checkpoint" in job.log
    submit("one_node", "cpu", "--output_dir", str(job.run), nodes=1).ended("COMPLETED")
    assert job.steps() == 12


def test_a_rank_that_is_killed_on_the_other_node_is_named_and_the_job_resumes(submit, cluster, undisturbed):
    job = submit("multi_node", "zero3", nodes=2)
    job.wait_for_step(5)
    os.kill(cluster.processes("n2", "-m grpo_math.train --config")[-1], signal.SIGKILL)
    cluster.start_again(job.number)
    job.ended("COMPLETED", restarts=1)
    assert 'error: node n2 ended with exit code 137: see the lines that begin with "1:"' in job.log
    assert job.weights() == undisturbed("zero3")


def test_a_node_that_fails_at_the_start_ends_the_job_with_its_code(submit, tmp_path):
    fails = tmp_path / "fails"
    fails.mkdir()
    (fails / "sitecustomize.py").write_text("import os, socket\nif socket.gethostname() == 'n2':\n    os._exit(7)\n")
    job = submit("multi_node", "multi_node", nodes=2, PYTHONPATH=str(fails))
    assert job.ended("FAILED")["ExitCode"] == "7:0"
    assert job.log.count("error: node n2 ended with exit code 7") == 1
