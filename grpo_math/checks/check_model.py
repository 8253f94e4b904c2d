"""Checks of the model, in its folder or on the Hub: its adapter, its chat template, and the length of the prompts.

Loads no weights, and the tokenizer only for ``--show``. A request to the Hub waits a few seconds at most.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError, Finding, as_config_error, escaped, require_choice
from grpo_math.generation.models import check_reference, check_weights, config_file, context_length, model_path
from grpo_math.generation.request import request_from
from grpo_math.planner.model import wanted_modules
from grpo_math.problems.problem import Problem
from grpo_math.settings.recipe import read
from grpo_math.system.reading import read_json, read_object
from grpo_math.system.streams import Answer

SECONDS = 30.0  # time limit of a request to a teacher
PROMPTS = 256  # prompts that are tokenized
ANSWER = "ANSWER"  # the text of the assistant in the rendered turn
QUANTILES = {"median": 0.5, "95%": 0.95, "longest": 1.0}


def model(setup: Setup) -> None:
    """The model is a folder with a config.json, or is on the Hub or in its cache."""
    read_json(config_file(setup.settings.model_name_or_path, setup.settings.model_revision))


def adapter(setup: Setup) -> None:
    """The adapter's modules exist.

    PEFT raises only if no name matches: a misspelt name among others would leave its maps untrained.
    """
    s = setup.settings
    if not s.use_peft:
        return
    paths, modules = setup.shape.paths, s.lora_target_modules or []
    linears = list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    one_name = "is one name, which TRL takes as an expression for a module's whole path"
    is_one_name = len(modules) == 1 and modules[0] in linears
    setup.refuse("lora_target_modules", is_one_name, one_name, f'write ".*{"".join(modules)}"')
    expected = wanted_modules(s)
    for name in modules if expected != "all-linear" else ():
        # PEFT matches a text as an expression for the whole path, and a name in a list with the end of the path. A path
        # of the shape has 0 in place of each number.
        expression = name if name == expected else rf"(.*\.)?{re.escape(name)}"
        if not any(re.fullmatch(expression, one) for path in paths for one in _numbered(path, setup.shape.layers)):
            remedy = f"use all-linear, or {', '.join(linears)}"
            raise ConfigError("lora_target_modules", name, "matches no linear map of a layer", remedy)
    for name in s.lora_modules_to_save or []:
        require_choice("lora_modules_to_save", name, ("embed_tokens", "lm_head", "norm", *linears))


def _numbered(path: str, layers: int) -> Iterator[str]:
    """Yield a path with each number that its layers can have.

    >>> [*_numbered("layers.0.q_proj", 2)]
    ['layers.0.q_proj', 'layers.1.q_proj']
    """
    parts = re.split(r"(?<=\.)0(?=\.)", path)
    for numbers in product(map(str, range(layers)), repeat=len(parts) - 1):
        yield "".join(chain.from_iterable(zip(parts, (*numbers, ""), strict=True)))


# With torch: the classes of training, and the tokenizer


def accepted_by_trl(setup: Setup) -> None:
    """The classes of training take the settings."""
    from grpo_math.checks.training import probe
    from grpo_math.trainer.recipe_settings import build

    settings = build(setup.recipe)
    probe(settings.run, settings.config)


def files(setup: Setup) -> None:
    """The tokenizer can be loaded, and the weights are complete."""
    path = model_path(setup.settings.model_name_or_path)
    _ = setup.tokenizer
    check_weights(path)


def chat_template(setup: Setup) -> None:
    """A template of messages needs a tokenizer that has a chat template, one that takes such messages."""
    for variable in setup.settings.chat_template_kwargs or {}:
        # Jinja ignores an unknown variable.
        if variable not in str(setup.tokenizer.chat_template):
            reason = "is not a variable of this model's chat template"
            raise ConfigError("chat_template_kwargs", variable, reason, "leave it out")
    if _is_chat(setup):
        name, reason = setup.settings.model_name_or_path, "has no chat template that takes this prompt"
        remedy = "use r1_zero, a module:function that returns text, or an instruct model"
        with as_config_error("model_name_or_path", name, reason, remedy):
            rendered(setup, setup.problems.first(1))
            turn_end(setup.tokenizer)


def reference(setup: Setup) -> None:
    """The reference model has the tokenizer of the trained model."""
    if setup.settings.reference_model:
        check_reference(setup.settings.reference_model, setup.tokenizer)


def end_of_turn(setup: Setup) -> Iterator[Finding]:
    """The token that ends an assistant's turn in the chat template is one at which generation stops.

    TRL stops at the tokenizer's EOS and at those of the model's generation_config.json; vLLM does the same.
    """
    tokenizer, eos = setup.tokenizer, setup.tokenizer.eos_token_id
    add = "add {} to eos_token_id in generation_config.json"
    folder = Path(str(tokenizer.name_or_path))
    # transformers reads config.json if there is no generation_config.json.
    config = read_object(folder / "generation_config.json") or read_object(folder / "config.json") or {}
    ids = config.get("eos_token_id")
    configured: set[Any] = set(ids) if isinstance(ids, list) else {ids} - {None}
    if configured and eos not in configured:
        message = f"the tokenizer's EOS is {eos} and generation_config has {sorted(configured)}"
        yield Finding("warning", f"{message}: trainers that look at one of them alone see no end", add.format(eos))
    if not _is_chat(setup) or not tokenizer.chat_template:
        return
    # Without a stop at the end of a turn, generation continues to the length limit and is cut off.
    end, stops = turn_end(tokenizer), {eos, *configured}
    if end is not None and end not in stops:
        token = tokenizer.convert_ids_to_tokens(end)
        message = f"a turn ends with {token!r} ({end}), and generation stops at {sorted(stops)}"
        yield Finding("error", f"{message}: no completion would end by itself", add.format(end))


def turn_end(tokenizer: Any) -> int | None:
    """Return the first special token after the assistant's text, in the rendered chat template."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    after = tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    return next((token for token in after if token in special), None)


def prompt_lengths(setup: Setup) -> Iterator[Finding]:
    """Prompts and completions together fit the model's context, and vLLM's if vLLM generates."""
    s, lengths = setup.settings, sampled_lengths(setup)
    at = {name: lengths[min(len(lengths) - 1, int(share * len(lengths)))] for name, share in QUANTILES.items()}
    words = ", ".join(f"{name} {length}" for name, length in at.items())
    yield Finding("info", f"prompt tokens of {len(lengths)} {'problem' if len(lengths) == 1 else 'problems'}: {words}")
    # This imports torch, as the tokenizer has done.
    from transformers import AutoConfig

    limits = {"max_position_embeddings of the model": context_length(AutoConfig.for_model(**setup.model_config))}
    # vLLM may be limited to a shorter context than the model's, to save memory.
    if s.use_vllm:
        limits["vllm_max_model_length"] = s.vllm_max_model_length
    longest = s.max_completion_length or 0
    for name, limit in limits.items():
        if limit is not None and (over := sum(length + longest > limit for length in lengths)):
            message = (
                f"{over} of {len(lengths)} prompts and max_completion_length={longest} come to more "
                f"than {name}, {limit} (the longest prompt has {lengths[-1]} tokens)"
            )
            yield Finding("error", message, "shorten max_completion_length, or leave out long problems")


def sampled_lengths(setup: Setup) -> list[int]:
    """Return the lengths in tokens of a sample of the prompts, in rising order."""
    return sorted(map(len, prompt_ids(setup, setup.problems.sample(PROMPTS))))


def prompt_ids(setup: Setup, rows: Sequence[Problem]) -> list[list[int]]:
    """Return the tokens of these prompts, as in TRL: a chat template writes the special tokens itself."""
    return setup.tokenizer(rendered(setup, rows), add_special_tokens=not _is_chat(setup))["input_ids"]


def rendered(setup: Setup, rows: Sequence[Problem]) -> list[str]:
    """Return the prompts of these rows as text."""
    if not _is_chat(setup):
        return [str(row["prompt"]) for row in rows]
    options = {
        "tokenize": False,
        "add_generation_prompt": True,
        **request_from(setup.settings.values()).template_kwargs,
    }
    return [setup.tokenizer.apply_chat_template(row["prompt"], **options) for row in rows]


def _is_chat(setup: Setup) -> bool:
    return not isinstance(setup.problems.first(1)[0]["prompt"], str)


def show(argv: Sequence[str], n: int) -> Answer:
    """Answer `grpo-math doctor --show N`: the first prompts of the recipe as text and as token ids."""
    if n < 1:
        raise ConfigError("show", n, "is not a number of problems", "give 1 or more")
    setup = Setup(read(argv).raise_first_problem())
    rows = setup.problems.first(n)
    chat_template(setup)  # refuses a prompt that the chat template cannot render
    shown, lines = [], []
    for row, ids in zip(rows, prompt_ids(setup, rows), strict=True):
        text = setup.tokenizer.decode(ids, skip_special_tokens=False)
        shown.append({"id": row["id"], "answer": row["answer"], "ids": ids, "text": text})
        lines += [
            f"--- {row['id']}: {len(ids)} tokens, gold answer {row['answer']!r}",
            escaped(text, keep="\n") + "[the completion starts here]",
            f"ids: {' '.join(map(str, ids))}",
        ]
    answer_format = setup.problems.template.answer_format
    request = request_from(setup.settings.values()).to_dict()
    sampled = ", ".join(f"{name} {value}" for name, value in request.items() if value not in (None, [], {}))
    text = "\n".join([*lines, f"answer format: {answer_format}", f"request: {escaped(sampled)}"])
    return Answer({"answer_format": answer_format, "request": request, "prompts": shown}, text)
