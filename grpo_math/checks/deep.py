"""`grpo-math doctor --deep`: checks that need the model, on a few problems.

A few completions are sampled as in training, but always with transformers, never with vLLM. Then policy and reference
score them as in an update.

Does not take a step, and writes nothing.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig
from trl import ModelConfig

from grpo_math.checks import Finding
from grpo_math.checks.prompts import rendered
from grpo_math.checks.setup import Setup
from grpo_math.checks.symptoms import KL_FIRST, SAMPLER_APART
from grpo_math.grading import grade_batch
from grpo_math.problems.problem import Problem
from grpo_math.rewards.rules import accuracy
from grpo_math.trainer.build import trainer_of
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.losses import kl_per_token

PROMPTS, EACH = 4, 2  # problems, and completions of each
CUT = 0.5  # if this share of the completions reaches the limit, the limit is too short for this model


def deep_checks(setup: Setup, config: MathGRPOConfig, model_args: ModelConfig) -> Iterator[Finding]:
    """Check verdicts and lengths, the agreement of trainer and sampler, and that the KL starts at zero."""
    config.use_vllm = False
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = folder
        trainer: Any = trainer_of(config, model_args, setup.problems.rows, setup.tokenizer, [accuracy])
        torch.manual_seed(config.seed)
        ids, mask, sampled, finished = _sample(trainer, setup)
        length = sampled.size(1)
        lengths = mask[:, -length:].sum(dim=1).tolist()
        yield completions(setup, trainer.processing_class.batch_decode(ids[:, -length:], True), lengths, finished)
        model = trainer.model.train()  # as in an update: dropout is on
        with torch.no_grad():
            scored = _score(trainer, model, ids, mask, length)
            yield agreement(scored, sampled, mask[:, -length:].bool())
            reference = _reference(trainer, model, ids, mask, length)
        if reference is not None:
            yield first_kl(scored, reference, mask[:, -length:].bool(), setup.settings["lora_dropout"])


def completions(setup: Setup, texts: list[str], lengths: list[int], finished: list[bool]) -> Finding:
    """Count verdicts and lengths of the untrained model's completions. Warn if the limit cuts too many."""
    s, rows = setup.settings, _rows(setup)
    golds = [row["answer"] for row in rows]
    grades = grade_batch(golds, texts, answer_format=setup.problems.template.answer_format, timeout=s["grade_timeout"])
    counts = Counter(str(grade.verdict) for grade in grades)
    cut = 1 - sum(finished) / len(finished)
    message = (
        f"{len(texts)} completions of the untrained model: {', '.join(f'{n} {v}' for v, n in counts.most_common())}; "
        f"median {median(lengths):g}, longest {max(lengths)} tokens, {cut:.0%} cut at {s['max_completion_length']}; "
        f"the first: {texts[0][:120]!r}"
    )
    longer = f"max_completion_length: {2 * s['max_completion_length']}"
    return _finding("completions", message, longer if cut >= CUT else "", "warning")


def agreement(scored: Tensor, sampled: Tensor, mask: Tensor) -> Finding:
    """Check the mean |log p of the trainer - log p of the sampler| over the completions' tokens, in nats.

    >>> one = torch.ones(1, 2, dtype=torch.bool)
    >>> agreement(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.0]]), one).level
    'error'
    """
    apart = (scored - sampled).abs()[mask].mean().item()
    message = f"log-probs of trainer and sampler differ by {apart:.1g} nats a token"
    remedy = "pack_updates: false; if that helps, report the model's name; else dtype: float32"
    return _finding("sampler_apart", message, "" if apart < SAMPLER_APART else remedy, "error")


def first_kl(scored: Tensor, reference: Tensor, mask: Tensor, dropout: float) -> Finding:
    """Check the k3 estimate of the KL to the reference. Before the first step the reference equals the policy.

    >>> one = torch.ones(1, 2, dtype=torch.bool)
    >>> first_kl(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.0]]), one, 0.0).level
    'info'
    """
    kl = kl_per_token(scored, reference, "k3")[mask].mean().item()
    message = f"the KL to the reference is {kl:.1g} nats a token before the first step"
    remedy = "lora_dropout: 0.0" if dropout else "see that the reference is the model that training starts from"
    return _finding("kl_not_zero_at_start", message, "" if kl < KL_FIRST else remedy, "error")


def _finding(check: str, message: str, remedy: str, level: str) -> Finding:
    """Return a finding. Without a remedy its level is info."""
    return Finding(level if remedy else "info", check, message, remedy)


def _rows(setup: Setup) -> list[Problem]:
    return [row for row in setup.problems.sample(PROMPTS) for _ in range(EACH)]


def _sample(trainer: Any, setup: Setup) -> tuple[Tensor, Tensor, Tensor, list[bool]]:
    """Return ids and mask of prompts and completions (B, S + T), sampler's log-probs (B, T), and which rows ended."""
    tokenizer, args = trainer.processing_class, trainer.args
    prompts = rendered(setup, _rows(setup))
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(trainer.args.device)
    sampling: Any = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    sampling |= {"eos_token_id": trainer.eos_token_ids, "pad_token_id": tokenizer.pad_token_id, "do_sample": True}
    config = GenerationConfig(
        max_new_tokens=args.max_completion_length, return_dict_in_generate=True, output_logits=True, **sampling
    )
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    with torch.no_grad():
        output = model.generate(**inputs, generation_config=config, disable_compile=True)
    logits = torch.stack(output.logits, dim=1).float() / args.temperature
    new = output.sequences[:, inputs["input_ids"].size(1) :]
    sampled = logits.log_softmax(dim=-1).gather(2, new[:, :, None])[:, :, 0]
    ends = torch.isin(new, torch.tensor(trainer.eos_token_ids, device=new.device))
    kept = ends.cumsum(dim=1) - ends.long() == 0  # up to and including the first end
    mask = torch.cat([inputs["attention_mask"], kept.long()], dim=1)
    return output.sequences, mask, sampled, ends.any(dim=1).tolist()


def _score(trainer: Any, model: Any, ids: Tensor, mask: Tensor, length: int) -> Tensor:
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, length)[0]


def _reference(trainer: Any, model: Any, ids: Tensor, mask: Tensor, length: int) -> Tensor | None:
    """Return log-probs of the reference: the base without its adapter, or TRL's reference model; or None."""
    if isinstance(model, PeftModel):
        with model.disable_adapter():
            return _score(trainer, model, ids, mask, length)
    if trainer.ref_model is not None:
        return _score(trainer, trainer.ref_model, ids, mask, length)
    return None
