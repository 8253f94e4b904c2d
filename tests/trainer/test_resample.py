"""Dynamic sampling: uniform groups give way, judged by verdict; it ends; what is logged and resumed is right."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from small_trainers import config

from grpo_math.errors import ConfigError
from grpo_math.grading import Grade, Verdict
from grpo_math.run import metrics
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.resample import PromptPool, replacing
from grpo_math.trainer.trainer import MathGRPOTrainer

G = 4


def shaped(completions, **columns):
    """Differs within every group, whatever the verdicts: a shaped sum."""
    return [float(len(text) + i % 3) for i, text in enumerate(completions)]


def problems(kinds: str) -> Dataset:
    """e: all completions right, h: all wrong, m: mixed, u: none can be graded."""
    return Dataset.from_list([{"prompt": f"{kind} {i} plus", "answer": kind} for i, kind in enumerate(kinds)])


def grades(rows, completions):
    right, wrong = Verdict.CORRECT, Verdict.WRONG
    verdicts = {"e": (right, right), "h": (wrong, wrong), "m": (right, wrong), "u": (Verdict.CRASH, Verdict.CRASH)}
    kinds = [row["answer"] for row in rows]
    return [Grade(verdicts[kind][i % 2], kind, in_format=True, reason="") for i, kind in enumerate(kinds)]


def make(small, chars, folder, kinds, **settings):
    extra = {"num_generations": G, "per_device_train_batch_size": 4 * G, "resample_groups": 2, **settings}
    trainer = MathGRPOTrainer(
        model=small,
        reward_funcs=shaped,
        args=config(MathGRPOConfig, folder, **extra),
        train_dataset=problems(kinds),
        processing_class=chars,
    )

    trainer._grade = grades
    trainer.rollouts = []
    generate = MathGRPOTrainer._generate_and_score_completions

    def recorded(inputs):
        output = generate(trainer, inputs)
        texts = chars.batch_decode(output["prompt_ids"], skip_special_tokens=True)
        trainer.rollouts.append((output, texts))
        return output

    trainer._generate_and_score_completions = recorded
    return trainer


def history(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


def test_fresh_groups_take_the_places_of_dull_ones_as_far_as_they_are_better():
    uniform, mixed = [True, True], [True, False]
    assert replacing(uniform + mixed + uniform, uniform + mixed, 2) == [8, 9, 2, 3, 4, 5]
    assert replacing(uniform, mixed + mixed, 2) == [2, 3]
    assert replacing(mixed, mixed, 2) == [0, 1]


def test_the_reserve_goes_through_all_rows_in_each_pass_and_passes_over_what_is_there():
    rows = [{"prompt": i} for i in range(10)]
    pool = PromptPool(rows, seed=3)
    passes = [[row["prompt"] for row in pool.take(10, avoid=[])] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))
    assert passes[0] != passes[1]
    assert 4 not in [row["prompt"] for row in PromptPool(rows, seed=3).take(9, avoid=[4])]
    assert len(PromptPool(rows[:1], seed=0).take(3, avoid=[0])) == 3  # nothing else is there: no endless search


def test_uniform_groups_give_way_and_the_rows_of_the_step_are_right(small, chars, tmp_path):
    trainer = make(small, chars, tmp_path, "eehu" * 4 + "m" * 48, logging_steps=1, log_completions=True)
    trainer.train()
    drawn, kept = history(trainer, metrics.PROMPTS_DRAWN), history(trainer, metrics.PROMPTS_KEPT)
    thrown = history(trainer, metrics.PROMPTS_THROWN_AWAY)
    assert len(drawn) == 5
    assert max(drawn) > 4
    assert [d - t for d, t in zip(drawn, thrown, strict=True)] == [4] * 5
    replaced = 0
    for (output, texts), n in zip(trainer.rollouts, kept, strict=True):
        groups = [texts[i : i + G] for i in range(0, len(texts), G)]
        assert all(len(set(group)) == 1 for group in groups)
        assert sum(group[0].startswith("m") for group in groups) == n
        assert len(texts) == 4 * G
        assert output["num_items_in_batch"] == output["completion_mask"].sum()
        advantages = output["advantages"].view(-1, G)
        torch.testing.assert_close(advantages.mean(dim=1), torch.zeros(4), atol=1e-5, rtol=0)
        replaced += n
    assert replaced > sum(history(trainer, metrics.ACCURACY)) * 4  # more mixed groups than were drawn at first
    assert [prompt.split()[0] for prompt in trainer._logs["prompt"]] == [t.split()[0] for t in trainer.rollouts[-1][1]]
    assert len(trainer._logs["advantages"]) == len(trainer._logs["rewards"]["shaped"]) == 4 * G


def test_it_ends_after_the_last_round_judged_by_verdicts_and_logs_the_first_draw(small, chars, tmp_path):
    trainer = make(small, chars, tmp_path, "e" * 12, max_steps=1, logging_steps=1)
    trainer.train()
    assert history(trainer, metrics.PROMPTS_DRAWN) == [12]  # four, and four more in each of two rounds
    assert history(trainer, metrics.PROMPTS_KEPT) == [0]
    assert history(trainer, metrics.REWARD_STD)[0] > 0  # but verdicts are all the same
    assert history(trainer, metrics.ACCURACY) == history(trainer, metrics.ALL_RIGHT) == [1.0]
    phases = [history(trainer, phase)[0] for phase in metrics.PHASES if phase != metrics.SECONDS_SYNC]
    whole = sum(phases) + history(trainer, metrics.SECONDS_UPDATE)[0]
    assert whole == pytest.approx(history(trainer, metrics.SECONDS_STEP)[0])


def test_without_answers_there_is_nothing_to_judge_by(small, chars, tmp_path):
    with pytest.raises(ConfigError, match="resample_groups=1 needs a train_dataset"):
        MathGRPOTrainer(
            model=small,
            reward_funcs=shaped,
            args=config(MathGRPOConfig, tmp_path, resample_groups=1),
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 4),
            processing_class=chars,
        )
