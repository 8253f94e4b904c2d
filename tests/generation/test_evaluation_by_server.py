"""A trainer whose rollouts come from a real vLLM server is evaluated by that server, with the weights of training."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from vllm_process import VLLM, Process

from grpo_math import MathGRPOConfig, MathGRPOTrainer, evaluate, load_problems
from grpo_math.evaluation.compare import ResultsError, compare

pytestmark = [pytest.mark.full, pytest.mark.skipif(not VLLM, reason="GRPO_MATH_VLLM names no vllm to serve with")]


@pytest.fixture(scope="module")
def process(smollm, tmp_path_factory):
    process = Process(smollm, tmp_path_factory.mktemp("vllm"))
    yield process
    process.stop()


def test_a_real_server_evaluates_the_adapter_as_it_is_now(process, smollm, tokenizer, tmp_path):
    rows = load_problems("generated:sums", "heldout", limit=6)
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "max_completion_length": 12, "num_generations": 2}
    settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": process.server.url}
    settings |= {"per_device_train_batch_size": 2, "model_init_kwargs": {"dtype": "bfloat16"}}
    trainer = MathGRPOTrainer(
        model=smollm,
        reward_funcs="accuracy",
        args=MathGRPOConfig(str(tmp_path), **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]),
    )
    model = trainer.accelerator.unwrap_model(trainer.model)

    def answers(step, **sampling):
        trainer.state.global_step = step
        results = evaluate(trainer, rows, progress=False, **sampling)
        assert results["backend"] == "vllm"
        return results, [row["completion"] for row in results["rows"]]

    first, greedy = answers(0)
    plain = evaluate(model, rows, tokenizer=tokenizer, max_new_tokens=12, progress=False)
    same = [row["completion"] == text for row, text in zip(plain["rows"], greedy, strict=True)]
    assert sum(same) >= 4  # near ties of bfloat16 may differ
    with pytest.raises(ResultsError, match="backend differs"):
        compare(plain, first)
    sampled = [answers(0, samples=4, temperature=1.0)[1] for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert len(set(sampled[0])) > 6
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.05)
    assert answers(1)[1] != greedy
    assert trainer.vllm_generation.rollouts == 0
