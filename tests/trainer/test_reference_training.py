"""Five training steps against the formulas, written out in plain torch: the same losses and the same weights.

The trainer generates and trains; what it sampled (token ids and rewards) is recorded. `replay` then trains the same
model on the recording, one unpadded sequence after the other, from the advantages that `test_advantages.py` holds to
numbers by hand, and the formulas of the papers.

The last test compares the trainer with itself: the rows of a step in one process and in two.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from launching import TORCHRUN, accelerate, run
from small_trainers import config, relative, weights
from transformers import AutoModelForCausalLM
from trl.trainer import grpo_trainer

from grpo_math.settings.rules import CLIPPED
from grpo_math.trainer.advantages import advantages
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

PROMPTS = [
    f"{text}{i}" for i in range(4) for text in ("What is 3 + 4?", "Hello", "A longer prompt, with more words", "")
]
G = 4
LENGTH = 6  # max_completion_length
TEMPERATURE = 0.8
LEARNING_RATE = 0.05
ADVANTAGE_EPS = 1e-3

PLAIN = {
    "baseline": "group_mean",
    "scale_rewards": "group",
    "surrogate": "clip",
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "beta": 0.0,
    "kl_estimator": "k3",
    "use_bias_correction_kl": True,
    "num_iterations": 1,
    "gradient_accumulation_steps": 1,
    "rollouts": "one step",  # how many optimizer steps a rollout batch is cut into
    "pack_updates": True,
}
UPDATES, OLDER, CUT = {"num_iterations": 2}, {"rollouts": "two steps"}, {"gradient_accumulation_steps": 2}
K1, K2 = {"beta": 0.2, "kl_estimator": "k1"}, {"beta": 0.2, "kl_estimator": "k2"}
LEFT_OUT = {"baseline": "leave_one_out"}
# Each value of each option, and what is divided by the tokens of one step out of two.
RUNS = [
    {"loss_type": "dapo", **K1, **UPDATES, **OLDER},
    {"loss_type": "grpo", "surrogate": "reinforce", **LEFT_OUT, "scale_rewards": "batch", **CUT},
    {"loss_type": "grpo", **K2, **UPDATES, **OLDER, "pack_updates": False},
    {"loss_type": "bnpo", "baseline": "none", "scale_rewards": "none", **UPDATES, **CUT},
    {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.2, **UPDATES, **CUT},
    {"loss_type": "dapo", "surrogate": "reinforce", **LEFT_OUT, **K1, **OLDER},
    {"loss_type": "dapo", **K2, "use_bias_correction_kl": False, **OLDER, **CUT},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", **LEFT_OUT, **UPDATES},
    {"loss_type": "cispo", "scale_rewards": "batch", **OLDER, **CUT},
    {"loss_type": "sapo", "beta": 0.2, "use_bias_correction_kl": False, **UPDATES},
    {"loss_type": "vespo", **OLDER, "pack_updates": False},
]


def letters(completions, **columns):
    """A reward that varies within a group; a few completions cannot be graded."""
    values = [sum(map(ord, text)) % 7 for text in completions]
    return [None if value == 6 else value / 4 for value in values]


def settings_of(setting: dict) -> dict:
    """The arguments of `MathGRPOConfig`."""
    given = {name: value for name, value in setting.items() if name != "rollouts"}
    if setting["surrogate"] == "clip" and setting["loss_type"] == "cispo":
        given["epsilon_high"] = 1.1
    elif setting["surrogate"] == "clip" and setting["loss_type"] not in ("sapo", "vespo"):
        given |= {"epsilon": 0.02, "epsilon_high": 0.03}
    cut = 2 if setting["rollouts"] == "two steps" else 1
    return {**given, "steps_per_generation": cut * setting["gradient_accumulation_steps"]}


def make(model, tokenizer, folder, rewards=letters, rollout_func=None, **settings):
    base = {
        "num_generations": G,
        "max_completion_length": LENGTH,
        "temperature": TEMPERATURE,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "advantage_eps": ADVANTAGE_EPS,
        "logging_steps": 1,
    }
    return MathGRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=config(MathGRPOConfig, folder, **{**base, **settings}),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=tokenizer,
        rollout_func=rollout_func,
    )


# The recording


def rows_of(inputs: dict) -> list[tuple]:
    """(prompt, completion) as tuples of token ids, without padding."""
    columns = (inputs[name].tolist() for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"))
    return [
        tuple(tuple(i for i, m in zip(ids, mask, strict=True) if m) for ids, mask in ((p, pm), (c, cm)))
        for p, pm, c, cm in zip(*columns, strict=True)
    ]


def record(trainer, rewards: list, monkeypatch) -> list[tuple]:
    """(rows, rewards, TRL's micro-batches of rows) of every rollout batch, as the trainer makes them."""
    rollouts: list[tuple] = []
    generate, split = trainer._generate_and_score_completions, grpo_trainer.split_tensor_dict

    def generating(inputs):
        rewards.clear()
        output = generate(inputs)
        rollouts.append((rows_of(output), list(rewards), []))
        return output

    def splitting(batch, parts):
        micro_batches = split(batch, parts)
        rollouts[-1][2].extend(map(rows_of, micro_batches))
        return micro_batches

    trainer._generate_and_score_completions = generating
    monkeypatch.setattr(grpo_trainer, "split_tensor_dict", splitting)
    return rollouts


# The reference


def log_probs(model, row: tuple) -> torch.Tensor:
    prompt, completion = row
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1)[torch.arange(len(completion)), list(completion)]


def reference_loss(logps, old, ref, advantage: float, setting: dict, clips: dict) -> torch.Tensor:
    """The losses of one completion's tokens."""
    if setting["surrogate"] == "reinforce":
        old = logps.detach()
    log_ratio = logps - old
    level_ratio = log_ratio.mean().expand_as(logps) if setting["importance_sampling_level"] == "sequence" else log_ratio
    ratio = level_ratio.exp()
    loss_type = setting["loss_type"]
    if setting["surrogate"] == "reinforce":
        loss = -advantage * ratio
    elif loss_type == "cispo":  # arXiv 2506.13585, eq. 4
        loss = -ratio.clamp(max=clips["epsilon_high"]).detach() * advantage * logps
    elif loss_type == "sapo":  # arXiv 2511.20347, eq. 6
        heat = 1.0 if advantage > 0 else 1.05
        loss = -(4 / heat) * torch.sigmoid(heat * (ratio - 1)) * advantage
    elif loss_type == "vespo":  # arXiv 2602.10693
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        w = log_ratio.detach().sum().exp()
        loss = -(w**k * torch.exp(rate * (1 - w))) * advantage * logps
    else:  # arXiv 1707.06347, eq. 7
        clipped = ratio.clamp(1 - clips["epsilon"], 1 + clips["epsilon_high"])
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
    if setting["beta"]:
        d = logps - ref
        kl = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[setting["kl_estimator"]]
        loss = loss + setting["beta"] * (kl * ratio if setting["use_bias_correction_kl"] else kl)
    return loss


def micro_batch_loss(losses: list[torch.Tensor], loss_type: str, micro_batches: int, tokens_of_step: float):
    if loss_type in ("dapo", "cispo", "vespo"):
        return sum(loss.sum() for loss in losses) / tokens_of_step
    by_rows = {
        "grpo": lambda: sum(loss.mean() for loss in losses) / len(losses),
        "bnpo": lambda: torch.cat(losses).mean(),
        "dr_grpo": lambda: sum(loss.sum() for loss in losses) / (len(losses) * LENGTH),
        "luspo": lambda: sum(loss.sum() for loss in losses) / len(losses),
    }
    return by_rows["grpo" if loss_type == "sapo" else loss_type]() / micro_batches


def replay(folder: str, rollouts: list[tuple], setting: dict) -> tuple[list[float], torch.Tensor]:
    """The losses of the optimizer steps, summed over their micro-batches, and the final weights."""
    model, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    clips, accumulation = settings_of(setting), setting["gradient_accumulation_steps"]
    losses = []
    for rows, rewards, micro_batches in rollouts:
        graded = torch.tensor([math.nan if reward is None else reward for reward in rewards]).view(-1, G)
        weighed = advantages(graded, setting["baseline"], setting["scale_rewards"], ADVANTAGE_EPS).flatten().tolist()
        with torch.no_grad():
            known = {
                row: (log_probs(model, row), log_probs(reference, row), advantage)
                for row, advantage in zip(rows, weighed, strict=True)
            }
        # TRL's share: the tokens of the rollout batch over its optimizer steps, not those of this very step.
        tokens = sum(len(completion) for _, completion in rows) * accumulation / len(micro_batches)
        updates = micro_batches * setting["num_iterations"]
        for first in range(0, len(updates), accumulation):
            if len(losses) == 5:
                break
            losses.append(0.0)
            for micro_batch in updates[first : first + accumulation]:
                terms = []
                for row in micro_batch:
                    old, ref, advantage = known[row]
                    terms.append(reference_loss(log_probs(model, row), old, ref, advantage, setting, clips))
                loss = micro_batch_loss(terms, setting["loss_type"], accumulation, tokens)
                loss.backward()
                losses[-1] += loss.item()
            optimizer.step()
            optimizer.zero_grad()
    return losses, weights(model)


@pytest.mark.full(keep=["dapo-0.2-k1"])
@pytest.mark.parametrize("changed", RUNS, ids=lambda changed: "-".join(map(str, changed.values())))
def test_five_steps_give_the_losses_and_the_weights_of_the_formulas(changed, tiny, tokenizer, tmp_path, monkeypatch):
    setting = {**PLAIN, **changed}
    rewards: list = []

    def rewarding(completions, **columns):
        rewards.extend(letters(completions))
        return letters(completions)

    trainer = make(tiny(), tokenizer, tmp_path, rewarding, **settings_of(setting))
    before = weights(trainer.model)
    rollouts = record(trainer, rewards, monkeypatch)
    trainer.train()
    losses, expected = replay(tiny(), rollouts, setting)
    assert relative(expected, before) > 1e-4, "nothing was trained"
    torch.testing.assert_close(weights(trainer.model), expected, atol=1e-6, rtol=0)
    assert relative(weights(trainer.model), expected) < 1e-6
    history = [logged for logged in trainer.state.log_history if "loss" in logged]
    logged_losses = torch.tensor([float(logged["loss"]) for logged in history])
    torch.testing.assert_close(logged_losses, torch.tensor(losses), atol=1e-6, rtol=1e-5)
    if setting["num_iterations"] == 2 or setting["rollouts"] == "two steps":
        assert float(history[1]["ratio"]) != 1, "the second step is off policy"
        if setting["surrogate"] == "clip" and setting["loss_type"] in CLIPPED:
            assert any(float(logged["clip_ratio/region_mean"]) > 0 for logged in history), "nothing was clipped"
    else:
        assert all(float(logged["approx_kl"]) == 0 for logged in history)


def scripted(prompts, trainer):
    """A `rollout_func`: the completions of a prompt at a step are the same whichever rank has it."""
    tokenizer, seen, output = trainer.processing_class, {}, []
    for prompt in prompts:
        seen[prompt] = seen.get(prompt, 0) + 1
        seed = trainer.state.global_step * 100_000 + seen[prompt] * 2_000 + sum(map(ord, prompt))
        generator = torch.Generator().manual_seed(seed)
        length = int(torch.randint(1, LENGTH + 1, (), generator=generator))
        completion = torch.randint(5, 40_000, (length,), generator=generator).tolist()
        output.append((tokenizer(prompt)["input_ids"], completion))
    return {"prompt_ids": [p for p, _ in output], "completion_ids": [c for _, c in output], "logprobs": None}


# The rows of an optimizer step are 16 in all.
PROCESS_RUNS = {
    "dapo with k1, two updates a rollout": {"beta": 0.2, "kl_estimator": "k1", "num_iterations": 2},
    "grpo with reinforce": {"loss_type": "grpo", "surrogate": "reinforce", "baseline": "leave_one_out"},
    "dr_grpo with the batch deviation": {"loss_type": "dr_grpo", "scale_rewards": "batch"},
}


def main(folder: str, output: str) -> None:
    """Train every `PROCESS_RUNS` on this rank; rank 0 saves the weights and the history."""
    from transformers import AutoTokenizer

    tokenizer, results = AutoTokenizer.from_pretrained(folder), {}
    for name, settings in PROCESS_RUNS.items():
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        trainer = make(
            folder,
            tokenizer,
            Path(output).parent / "run",
            rollout_func=scripted,
            per_device_train_batch_size=16 // ranks,
            **settings,
        )
        assert trainer.accelerator.num_processes == ranks
        trainer.train()
        logged = [
            {key: float(step[key]) for key in ("loss", "reward", "ratio", "approx_kl", "kl") if key in step}
            for step in trainer.state.log_history
            if "loss" in step
        ]
        results[name] = (weights(trainer.model), logged, str(trainer.accelerator.distributed_type), ranks)
    if trainer.accelerator.is_main_process:
        torch.save(results, output)


@pytest.mark.full
def test_one_process_two_and_two_of_deepspeed_give_the_same_weights_and_metrics(tiny, tmp_path):
    pytest.importorskip("deepspeed")
    starts = {
        ("DistributedType.NO", 1): [sys.executable],
        ("DistributedType.MULTI_CPU", 2): TORCHRUN,
        ("DistributedType.DEEPSPEED", 2): accelerate("zero2_offload", tmp_path, "--num_processes", "2"),
    }
    results = {}
    for launched, start in starts.items():
        run([*start, __file__, tiny(), str(tmp_path / "results.pt")])
        results[launched] = torch.load(tmp_path / "results.pt")
    one = results.pop(("DistributedType.NO", 1))
    for launched, several in results.items():
        for name in PROCESS_RUNS:
            assert several[name][2:] == launched
            assert relative(several[name][0], one[name][0]) < 1e-6, (launched, name)
            for a, b in zip(one[name][1], several[name][1], strict=True):
                assert a == pytest.approx(b, abs=1e-5), (launched, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
