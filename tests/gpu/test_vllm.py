"""On a real GPU: a run samples from vLLM, in its own process and from a server, with the adapter that it has."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import launching
import pytest
import torch
from processes.colocated_gpu import STEPS, logged, trained
from small_trainers import relative
from vllm_process import VLLM, serving

from grpo_math.run import metrics

pytestmark = pytest.mark.gpu
PROGRAM = str(Path(__file__).parents[1] / "processes/colocated_gpu.py")
SHARE = 0.3  # of the GPU's memory, for vLLM
here = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed beside torch")


def colocated(model, folder, **settings):
    """Return the record of a run with vLLM in its process."""
    folder.mkdir(exist_ok=True)
    settings |= {"vllm_gpu_memory_utilization": SHARE, "vllm_max_model_length": 512}
    launching.run([sys.executable, PROGRAM, model, str(folder), json.dumps(settings)])
    return torch.load(folder / "record.pt")


def told(record, figure):
    """The figure, and that the sampler's log-probs agreed with the policy's at each sync."""
    names = (metrics.SECONDS_GENERATE, metrics.SECONDS_SYNC, metrics.SECONDS_UPDATE, metrics.TOKENS_PER_SECOND)
    generating, syncing = (record["steps"][-1][name] for name in names[:2])
    says = f"{generating:.1f} s of generation, {syncing:.2f} s of sending the adapter"
    figure(says=says, steps=[{name: step.get(name) for name in names} for step in record["steps"]])
    assert len(record["steps"]) == STEPS
    assert record["agreed"] >= 1


@here
@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleeping"])
def test_a_run_with_vllm_in_its_own_process(sleeps, model, tmp_path, figure):
    told(colocated(model, tmp_path, vllm_enable_sleep_mode=sleeps), figure)


@here
def test_one_copy_of_the_base_trains_the_same_adapter_in_less_memory(model, tmp_path, figure):
    """With sleep, and with CUDA graphs, which are captured on the tensors that are trained."""
    settings = {"vllm_enable_sleep_mode": True, "temperature": 1e-3}
    two, one = (
        colocated(model, tmp_path / str(shares), vllm_share_weights=shares, **settings) for shares in (False, True)
    )
    for record in (two, one):
        told(record, figure)
        assert record["captures_graphs"]
    size, difference = two["base_bytes"], relative(one["adapter"], two["adapter"])
    # vLLM takes the same share of the GPU in both runs.
    used = [record["used_bytes"] for record in (two, one)]
    says = " and ".join(f"{bytes_ / size:.2f}" for bytes_ in used) + " times the bytes of the base"
    figure(says=says, base_bytes=size, used_bytes=used, difference=difference)
    assert (two["shared"], one["shared"]) == (0, 1)
    assert used[0] - used[1] > 0.8 * size
    assert difference < 1e-2


def test_a_run_with_a_vllm_server_on_the_same_gpu(model, tmp_path, figure):
    executable = VLLM or shutil.which("vllm")
    if not executable:
        pytest.skip("there is no vllm: neither GRPO_MATH_VLLM nor PATH has one")
    with serving(model, tmp_path, executable, extra=("--gpu-memory-utilization", str(SHARE))) as process:
        told(logged(trained(model, tmp_path, vllm_mode="server", vllm_server_base_url=process.url)), figure)
