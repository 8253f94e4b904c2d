"""Small trainers, TRL's own and ours, in float32 on a CPU, their batches, and what is compared of them."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from small_generation import of_library
from small_runs import RUN
from transformers import TrainerCallback

from grpo_math.checks.compared import (
    KINDS,
    PROMPTS,
    SMALL,
    STEPS,
    config,
    letters,
    make,
    padded_batch,
    relative,
    sample_apart,
    scored,
    weights,
)
from grpo_math.checks.tiny_model import CHARACTERS, character_tokenizer
from grpo_math.checks.tiny_model import save_tiny as save_small
from grpo_math.grading import Grade, Verdict

__all__ = [
    "CHARACTERS",
    "KINDS",
    "PROMPTS",
    "SMALL",
    "STEPS",
    "character_tokenizer",
    "config",
    "letters",
    "make",
    "padded_batch",
    "relative",
    "sample_apart",
    "save_small",
    "scored",
    "weights",
]


def sparse(completions, **columns):
    """Half of the groups get equal rewards: they move no weight, and packing skips them."""
    groups = [completions[i : i + 4] for i in range(0, len(completions), 4)]
    return [float(len(t) % 3) if "".join(g) > "K" else 1.0 for g in groups for t in g]


def group_mean(rewards):
    """TRL's advantage as a function of a user's own: ``baseline="small_trainers:group_mean"``."""
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)


def clip(logps, old_logps, advantages, mask):
    """TRL's clipped loss as a function of a user's own: ``surrogate="small_trainers:clip"``."""
    ratio = (logps - old_logps).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def problems(kinds):
    """e: all completions right, h: all wrong, m: right and wrong in turn, u: none can be graded."""
    return [{"prompt": f"{kind} {i} plus", "answer": kind} for i, kind in enumerate(kinds)]


def grades(rows, completions, ids):
    """In place of `Grader.grade`, for `problems`."""
    right, wrong = Verdict.CORRECT, Verdict.WRONG
    verdicts = {"e": (right, right), "h": (wrong, wrong), "m": (right, wrong), "u": (Verdict.CRASH, Verdict.CRASH)}
    kinds = [row["answer"] for row in rows]
    return [Grade(verdicts[kind][i % 2], kind, in_format=True, reason="") for i, kind in enumerate(kinds)]


@contextmanager
def results_of(trainer, name):
    """Record the last result of a method."""
    results, method = [], getattr(trainer, name)

    def recorded(*args, **kwargs):
        results[:] = [method(*args, **kwargs)]
        return results[0]

    with patch.object(trainer, name, recorded):
        yield results


class Evaluated(TrainerCallback):
    """Each evaluation gets the next of these rewards. ``metrics``: what callbacks such as early stopping get."""

    def __init__(self, rewards=()):
        self.figures, self.metrics = ({"eval_reward": reward} for reward in rewards), []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics.update(next(self.figures, {}))  # transformers reads the same dict afterwards
        self.metrics.append(metrics)


def runs_out_forward(model, limit):
    """Let every forward pass of an update with more tokens fail for want of memory."""

    def hook(module, args, kwargs):
        if torch.is_grad_enabled() and kwargs["input_ids"].numel() > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    model.register_forward_pre_hook(of_library(hook), with_kwargs=True)


def untimed(trainer):
    """The log without its times."""
    timed = ("time", "per_second", "runtime", "seconds", "memory")
    lines = trainer.state.log_history
    return [{name: line[name] for name in line if not any(word in name for word in timed)} for line in lines]


def logps_of(model, prompt, completion):
    """The log-probs of a completion's tokens, plainly."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.fixture
def train(small, tmp_path, monkeypatch, capfd):
    """``train(*words, reward=...)`` -> the exit code of a run in ``tmp_path / "run"``, and the lines it printed.

    Without ``report`` its plots are not drawn, which is more than half of a short run's time.
    """

    from grpo_math.report import finish
    from grpo_math.train.program import main

    def run(*words, reward=letters, output_dir=tmp_path / "run", report=False):
        if not report:
            monkeypatch.setattr(finish, "print_result", lambda *_: None)
        monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(reward=reward))
        capfd.readouterr()
        command = ["--model_name_or_path", small, "--output_dir", output_dir, *RUN, "--rewards=mine:reward", *words]
        code = main([str(word) for word in command])
        printed = capfd.readouterr()
        return code, [*printed.err.splitlines(), *printed.out.splitlines()]

    return run
