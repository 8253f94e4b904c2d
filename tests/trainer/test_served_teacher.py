"""A teacher on a real vLLM server on the CPU, whose `vllm` GRPO_MATH_VLLM names (vllm_environment.sh).

Its log-probs are those of the teacher in the process, also with the prefix cache on. Two processes of ZeRO-2, of ZeRO-3
and of FSDP2 train with it; the last two refuse a teacher in the process. It is killed at the end.
"""

import json

import pytest
import torch
from launching import ROOT, accelerate, ranks, run
from small_trainers import make, relative
from transformers import AutoTokenizer
from vllm_process import VLLM, serving

from grpo_math import MathGRPOConfig, MathGRPOTrainer
from grpo_math.generation.lost_server import ServerUnavailable

pytestmark = [
    pytest.mark.skipif(not VLLM, reason="GRPO_MATH_VLLM names no vllm to serve with"),
    pytest.mark.timeout(1500),  # a start of the server may take minutes
    pytest.mark.full,
]
PROGRAM = ROOT / "tests/processes/train.py"
DISTIL = {"beta": 0.5, "kl_estimator": "advantage", "rows": "scripted"}


def test_a_served_teacher_is_the_teacher_in_the_process_until_it_is_killed(tiny, tmp_path):
    pytest.importorskip("deepspeed.ops")
    teacher, policy = tiny("served"), tiny("llama")
    options = {"dtype": "float32", "lora_rank": 0, "fixed": True, "on_gpu": False, "extra": ("--max-num-seqs", "16")}
    with serving(teacher, tmp_path, VLLM, **options) as process:
        classes = {"trainer_class": MathGRPOTrainer, "config_class": MathGRPOConfig}
        tokenizer = AutoTokenizer.from_pretrained(policy)

        def trainer_of(name, folder, **settings):
            settings = {"beta": 0.5, "per_device_train_batch_size": 4, "vllm_server_timeout": 20.0, **settings}
            return make(**classes, model=policy, tokenizer=tokenizer, folder=folder, reference_model=name, **settings)

        here, served = trainer_of(teacher, tmp_path / "here"), trainer_of(process.url, tmp_path / "served")
        # Longer than a block of the prefix cache (128 tokens on CPUs), and with the same prompt twice.
        ids = torch.randint(5, 40_000, (4, 300), generator=torch.Generator().manual_seed(0))
        ids[1, :200], mask = ids[0, :200], torch.ones_like(ids)
        mask[2, :50] = mask[3, 280:] = 0
        for _ in range(2):
            ours, theirs = (
                one._get_per_token_logps_and_entropies(one.ref_model, ids, mask, 100)[0] for one in (here, served)
            )
            torch.testing.assert_close(ours * mask[:, -100:], theirs, atol=1e-5, rtol=0)
            assert theirs[mask[:, -100:].bool()].max() < 0
        runs = {"here": {**DISTIL, "reference_model": teacher}, "served": {**DISTIL, "reference_model": process.url}}
        starts = {
            "zero2": (accelerate("zero2", tmp_path, "--num_processes", "2"), runs, ("DEEPSPEED", 2, [2, None, None])),
            "zero3": (
                accelerate("zero3", tmp_path, "--num_processes", "2"),
                {"served": runs["served"]},
                ("DEEPSPEED", 2, [3, None, None]),
            ),
            "fsdp2": (
                [*accelerate("fsdp2", tmp_path, "--num_processes", "2"), str(PROGRAM.with_name("fsdp_on_cpu.py"))],
                {"served": {**runs["served"], "use_cpu": False}},
                ("FSDP", 2),
            ),
        }
        ends = {}
        for kind, (start, of_kind, launched) in starts.items():
            run([*start, str(PROGRAM), policy, str(tmp_path / kind), json.dumps({"ours": of_kind})])
            for name in of_kind:
                assert abs(ranks(tmp_path / kind / "ours", name, *launched)[0]["kl"][0]) > 0.01
                state = torch.load(tmp_path / kind / f"ours/{name}.pt", weights_only=True)
                ends[kind, name] = torch.cat([state[key].flatten() for key in sorted(state)])
        for end in ends.values():
            assert relative(end, ends["zero2", "here"]) < 1e-5
        saves = {"max_steps": 4, "save_strategy": "steps", "save_steps": 100, "vllm_server_timeout": 5.0}
        trainer = trainer_of(process.url, tmp_path / "killed", **saves)
        generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: (
            (process.stop() if trainer.state.global_step == 2 else None) or generate(inputs)
        )
        with pytest.raises(ServerUnavailable, match=r"no vLLM server answers at .*\(checkpoint-2 is saved: "):
            trainer.train()
