"""Checks of the tokenizer: where a turn ends, padding, the length of the prompts.

Does not load the tokenizer, which is given, and reads no weights.
"""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from grpo_math.checks.setup import Said, Setup
from grpo_math.errors import ConfigError
from grpo_math.problems.datasets import Row
from grpo_math.reading import Unreadable, read_json

PROMPTS = 256  # that are tokenized
ANSWER = "ANSWER"  # what the assistant says in the rendered turn


def chat_template(setup: Setup) -> Iterator[Said]:
    """A template of messages needs a tokenizer that has a chat template, one that takes such messages."""
    tokenizer, s = setup.tokenizer, setup.settings
    if _is_chat(setup) and not tokenizer.chat_template:
        reason = "is a chat, and the tokenizer of this model has no chat template"
        raise ConfigError("template", s["template"], reason, "use r1_zero, or an instruct model")
    extra = s["chat_template_kwargs"] or {}
    for name in extra:
        if not _is_chat(setup):
            reason = f"would be ignored: template={s['template']!r} is not a chat"
        elif name in inspect.signature(tokenizer.apply_chat_template).parameters:
            reason = "is TRL's own to set"
        elif name not in str(tokenizer.chat_template):
            reason = "is not a variable of this model's chat template"
        else:
            continue
        raise ConfigError("chat_template_kwargs", name, reason, "leave it out")
    if s["tools"]:  # before the prompt is rendered, which may hold a call
        _talk(setup)
    if _is_chat(setup):
        messages = setup.rows[0]["prompt"]
        try:
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **extra)
            turn_end(tokenizer)
        except (TemplateError, TypeError, ValueError) as error:
            reason = f"has a chat template that refuses this prompt ({' '.join(str(error).split())})"
            remedy = "correct the template, or use r1_zero"
            raise ConfigError("model_name_or_path", s["model_name_or_path"], reason, remedy) from None
    yield from ()


def end_of_turn(setup: Setup) -> Iterator[Said]:
    """The token that ends an assistant's turn in the chat template is one at which generation stops.

    TRL stops at the tokenizer's EOS and at those of the model's generation_config.json; vLLM does the same.
    """
    tokenizer, eos = setup.tokenizer, setup.tokenizer.eos_token_id
    add = "add {} to eos_token_id in generation_config.json"
    if eos is None:
        yield Said("error", "the tokenizer has no EOS token: no completion would end", "set eos_token in its folder")
        return
    configured = _configured_eos(setup)
    stops = {eos, *configured}
    if configured and eos not in configured:
        said = f"the tokenizer's EOS is {eos} and generation_config has {sorted(configured)}"
        yield Said("warning", f"{said}: trainers that look at one of them alone see no end", add.format(eos))
    if not _is_chat(setup) or not tokenizer.chat_template:
        return
    end = turn_end(tokenizer)
    if end is None:
        yield Said("warning", "the chat template ends a turn with no token", "take a chat template that closes a turn")
    elif end not in stops:
        token = tokenizer.convert_ids_to_tokens(end)
        said = f"a turn ends with {token!r} ({end}), and generation stops at {sorted(stops)}"
        yield Said("error", f"{said}: no completion would end by itself", add.format(end))


def turn_end(tokenizer: Any) -> int | None:
    """The first special token after what the assistant says, in the rendered chat template."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    rest = tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    added = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    return next((token for token in rest if token in added), None)


def _configured_eos(setup: Setup) -> set[int]:
    """eos_token_id of generation_config.json, or without one of config.json; empty where neither can be had."""
    for file in ("generation_config.json", "config.json"):
        try:
            found = read_json(Path(str(setup.tokenizer.name_or_path)) / file).get("eos_token_id")
        except Unreadable:
            continue
        return set(found) if isinstance(found, list) else {found} - {None}
    return set()


def padding(setup: Setup) -> Iterator[Said]:
    """Prompts are padded on the left, with a token that the embedding has."""
    tokenizer = setup.tokenizer
    if tokenizer.padding_side != "left":
        said = "the tokenizer pads on the right: completions would start after padding"
        yield Said("error", said, "set padding_side='left'")
    if tokenizer.pad_token_id is None:
        remedy = "set pad_token in its folder, to the EOS token if need be"
        yield Said("error", "the tokenizer has no pad token", remedy)
        return
    vocabulary = setup.model_config.get("vocab_size")
    if isinstance(vocabulary, int) and tokenizer.pad_token_id >= vocabulary:
        said = f"the pad token {tokenizer.pad_token_id} is not in the model's vocabulary of {vocabulary}"
        yield Said("error", said, "set pad_token in the tokenizer's folder to a token that the model has")


def prompt_lengths(setup: Setup) -> Iterator[Said]:
    """Prompts and completions together fit the context, and vLLM's where it is used."""
    s = setup.settings
    if _is_chat(setup) and not setup.tokenizer.chat_template:
        return  # chat_template() has said so
    lengths = lengths_of(setup)
    at = {name: lengths[min(len(lengths) - 1, int(share * len(lengths)))] for name, share in QUANTILES.items()}
    words = ", ".join(f"{name} {length}" for name, length in at.items())
    yield Said("info", f"prompt tokens of {len(lengths)} problems: {words}", "", at)
    limits = {"max_position_embeddings of the model": setup.model_config.get("max_position_embeddings")}
    if s["use_vllm"]:
        limits["vllm_max_model_length"] = s["vllm_max_model_length"]
    for name, limit in limits.items():
        room = (limit or 0) - (s["max_completion_length"] or 0)
        if limit is None or lengths[-1] <= room:
            continue
        over = sum(length > room for length in lengths)
        said = (
            f"{over} of {len(lengths)} prompts and max_completion_length={s['max_completion_length']} come to more "
            f"than {name}, {limit} (the longest prompt has {lengths[-1]} tokens)"
        )
        yield Said("error", said, "shorten max_completion_length, or leave out long problems", at)


QUANTILES = {"median": 0.5, "95%": 0.95, "longest": 1.0}


def lengths_of(setup: Setup) -> list[int]:
    """Tokens of a sample of the prompts as training renders them, in rising order."""
    prompts = rendered(setup, setup.sample(PROMPTS))
    return sorted(len(ids) for ids in setup.tokenizer(prompts, add_special_tokens=False)["input_ids"])


def rendered(setup: Setup, rows: Sequence[Row]) -> list[str]:
    """The prompts of these rows as the text that is tokenized."""
    if not _is_chat(setup):
        return [row["prompt"] for row in rows]
    asks = {"tokenize": False, "add_generation_prompt": True, **(setup.settings["chat_template_kwargs"] or {})}
    if setup.settings["tools"]:
        talk = _talk(setup)
        asks |= {"tools": talk.tools, "chat_template": talk.chat_template}
    return [setup.tokenizer.apply_chat_template(row["prompt"], **asks) for row in rows]


def longest_prompt(setup: Setup) -> int | None:
    """Of a sample of the prompts, in tokens; None where that cannot be counted."""
    if setup.tokenizer is None or (_is_chat(setup) and not setup.tokenizer.chat_template):
        return None
    return lengths_of(setup)[-1]


def _talk(setup: Setup) -> Any:
    """The tools of the recipe, and the tokenizer with a template that renders their calls; `ConfigError` without."""
    from grpo_math.evaluation.toolbox import toolbox

    tools = toolbox(setup.settings["tools"], setup.settings["python"])
    return tools.talk(setup.tokenizer) if tools else None


def _is_chat(setup: Setup) -> bool:
    return not isinstance(setup.rows[0]["prompt"], str)
