"""Small trainers, TRL's own and ours, in float32 on a CPU, their batches, and what is compared of them."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from small_generation import small_model
from small_runs import RUN
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_math.algorithm.correction import sampler_ratio
from grpo_math.generation.chat import SMOLLM2_TEMPLATE
from grpo_math.grading import Grade, Verdict
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

PROMPTS = ["3 + 4?", "Hello", "What is 12 + 5?", "x"]  # of different lengths
STEPS = {"max_steps": 3, "logging_steps": 1}  # of a run that is compared with TRL's
SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
# Trainers that end with the same weights: what `make` and the fixture `ours` take for each.
KINDS = {
    "trl": {"trainer_class": GRPOTrainer, "config_class": GRPOConfig},
    "ours": {"trainer_class": MathGRPOTrainer, "config_class": MathGRPOConfig},
}


CHARACTERS = ["<|im_start|>", "<|im_end|>", "<pad>", "\n", *map(chr, range(32, 127))]


def character_tokenizer(*more, template=SMOLLM2_TEMPLATE):
    """Return a tokenizer whose tokens are characters, and what ``more`` names."""
    vocabulary = {token: number for number, token in enumerate([*CHARACTERS, *more])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        chat_template=template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        padding_side="left",
        additional_special_tokens=list(more),
    )


def save_small(folder):
    """Save a random llama whose tokens are characters. A step of its training takes a few milliseconds."""
    character_tokenizer().save_pretrained(folder)
    model = small_model(
        scale=6.0,
        hidden_size=16,
        intermediate_size=40,
        head_dim=4,
        max_position_embeddings=2048,
        vocab_size=len(CHARACTERS),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model.generation_config.eos_token_id = list(range(1, len(CHARACTERS), 8))
    model.save_pretrained(folder)
    return str(folder)


def letters(completions, **columns):
    """A reward that varies within a group and needs no gold answer."""
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


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


def grades(rows, completions):
    """In place of `RolloutMaker.grade`, for `problems`."""
    right, wrong = Verdict.CORRECT, Verdict.WRONG
    verdicts = {"e": (right, right), "h": (wrong, wrong), "m": (right, wrong), "u": (Verdict.CRASH, Verdict.CRASH)}
    kinds = [row["answer"] for row in rows]
    return [Grade(verdicts[kind][i % 2], kind, in_format=True, reason="") for i, kind in enumerate(kinds)]


def sample_apart(trainer):
    """Give each rollout the log-probs of a sampler that differs from the policy, and TRL's weights of its tokens."""
    generate = trainer._generate_and_score_completions

    def with_ratios(inputs):
        with patch.object(trainer, "use_vllm", False):
            output = generate(inputs)
        seed = trainer.state.global_step + 100 * trainer.accelerator.process_index
        mask = output["completion_mask"]
        noise = (0.5 + torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))).log()
        rows = [torch.cat([output[f"prompt_{name}"], output[f"completion_{name}"]], dim=1) for name in ("ids", "mask")]
        with torch.no_grad():
            logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, *rows, mask.size(1))
        settings = (getattr(trainer, f"vllm_importance_sampling_{name}") for name in ("mode", "clip_min", "clip_max"))
        output["importance_sampling_ratio"] = sampler_ratio(noise * mask, *settings)
        output["sampling_per_token_logps"] = logps - noise
        return output

    trainer._generate_and_score_completions = with_ratios
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True


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

    model.register_forward_pre_hook(hook, with_kwargs=True)


def config(kind, folder, **settings):
    base = {
        "use_cpu": True,
        "bf16": False,
        "max_steps": 5,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 0.05,
        "optim": "sgd",  # a step as long as the gradient: Adam would turn rounding at a zero gradient into a full step
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    return kind(str(folder), **{**base, **settings})


OF_TRAINER = ("peft_config", "eval_dataset", "tools", "rollout_func", "environment_factory")


def make(trainer_class, config_class, model, tokenizer, folder, rewards=letters, rows=None, **settings):
    """``rows``: of the data, or a data set of its own. ``settings``: of the trainer and of its config."""
    others = {name: settings.pop(name) for name in OF_TRAINER if name in settings}
    rows = [{"prompt": prompt} for prompt in PROMPTS * 4] if rows is None else rows
    return trainer_class(
        model=model,
        reward_funcs=rewards,
        args=config(config_class, folder, **settings),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        processing_class=tokenizer,
        **others,
    )


def padded_batch(prompt_lengths, group, lengths, seed=0):
    """Rows of left-padded prompts and right-padded completions: ``group`` completions of each prompt."""
    prompts = torch.tensor(prompt_lengths).repeat_interleave(group)
    completions = torch.tensor(lengths)[torch.arange(len(prompts)) % len(lengths)]
    width, longest = max(prompt_lengths), max(1, *lengths)
    position = torch.arange(width + longest) - width  # from the end of the prompt
    mask = (position >= -prompts[:, None]) & (position < completions[:, None])
    ids = torch.randint(5, len(CHARACTERS), mask.shape, generator=torch.Generator().manual_seed(seed))
    ids[:, :width] = ids[::group, :width].repeat_interleave(group, dim=0)
    return ids.where(mask, 2), mask.long(), longest


def untimed(trainer):
    """The log without its times."""
    timed = ("time", "per_second", "runtime", "seconds", "memory")
    lines = trainer.state.log_history
    return [{name: line[name] for name in line if not any(word in name for word in timed)} for line in lines]


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def logps_of(model, prompt, completion):
    """The log-probs of a completion's tokens, plainly."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def weights(model):
    return torch.cat([p.detach().flatten().to("cpu", copy=True) for p in model.parameters()])


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
