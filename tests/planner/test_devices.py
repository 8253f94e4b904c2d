"""Layouts of any number of GPUs."""

from grpo_math.planner import serve_layout

LORA = {"dtype": "bfloat16", "use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
LORA |= {"prompts_per_step": 16, "per_device_train_batch_size": 8}


def test_a_server_alone_takes_every_gpu_that_it_can():
    recipe = {**LORA, "model_name_or_path": "Qwen/Qwen2.5-32B"}
    assert serve_layout(recipe, gpus=8, gpu_gb=40)[1:4] == (0, 8, 2)
    full = serve_layout({**recipe, "use_peft": False}, gpus=6, gpu_gb=80)
    assert (full.server, full.tensor_parallel, full.idle) == (4, 4, 2)
