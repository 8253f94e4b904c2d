"""A run, an adapter or a model -> sides that can be asked: base and trained, with the run's template and lengths.

Does not print: report/conversation.py does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.evaluation import backends, of_run
from grpo_math.generation.completions import stop_ids, token_ids
from grpo_math.generation.models import base_of_adapter, check_weights, load_tokenizer, refuse_missing_folder
from grpo_math.generation.streaming import pieces, tokens
from grpo_math.problems.prompts import Template, as_template
from grpo_math.run.resume import config_of

PLAIN = "plain"  # the question as it is, as a chat where the model has a chat template
SIDES = ("base", "trained")


@dataclass
class Side:
    """One model under one name, and what was said with it so far."""

    model: Any
    tokenizer: Any
    adapter: bool
    said: list[dict[str, str]] = field(default_factory=list)


class Asked:
    """Base and trained side of ``target``, or one of them, loaded and ready to be asked.

    ``target``: a run directory, the folder of an adapter, or a model (a folder, a Hub id, 'embedded'), which has one
    side alone. ``only`` leaves out the other side; ``template`` and ``max_new_tokens`` are the run's where not given.
    """

    def __init__(
        self, target: str, only: str | None = None, template: str | None = None, max_new_tokens: int | None = None
    ) -> None:
        base, trained, own, longest = _read(target)
        named = own if template is None else template
        self.template, self.own = str(named), None if named == PLAIN else as_template(named)
        self.max_new_tokens = longest if max_new_tokens is None else max_new_tokens
        if self.max_new_tokens < 1:
            raise ConfigError("max_completion_length", max_new_tokens, "leaves nothing to say", "give 1 or more")
        if only is not None and trained is None:
            raise ConfigError("only", only, f"would be ignored: {target} is one model", "leave it out")
        self.sides = _sides(base, trained, only)

    def answers(self, question: str, temperature: float = 0.0, seed: int = 0) -> dict[str, Iterator[str]]:
        """The answer of each side as a stream of pieces; what was said before is part of a chat's prompt."""
        return {name: self._answer(name, side, question, temperature, seed) for name, side in self.sides.items()}

    def _answer(self, name: str, side: Side, question: str, temperature: float, seed: int) -> Iterator[str]:
        prompt = self._prompt(name, side, question)
        (ids,) = token_ids(side.tokenizer, [prompt])
        stops = stop_ids(side.tokenizer, side.model.generation_config)
        limits: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "temperature": temperature, "seed": seed}
        stream = tokens(side.model, ids, stops, adapter=side.adapter, **limits)
        text = ""
        for piece in pieces(side.tokenizer, stream):
            text += piece
            yield piece
        if not isinstance(prompt, str):
            side.said = [*prompt, {"role": "assistant", "content": text}]

    def _prompt(self, name: str, side: Side, question: str) -> Any:
        if side.said:
            return [*side.said, {"role": "user", "content": question}]
        if self.own is None:
            return [{"role": "user", "content": question}] if side.tokenizer.chat_template else question
        prompt = self.own.prompt(question)
        if not isinstance(prompt, str):
            backends.check_chat(name, side.tokenizer, prompt)
        return prompt

    def forget(self) -> None:
        """Start anew: nothing was said."""
        for side in self.sides.values():
            side.said = []


def ask(target: str, question: str, **settings: Any) -> dict[str, str]:
    """The whole answer of each side of ``target``; ``settings`` are those of `Asked`."""
    return {name: "".join(stream) for name, stream in Asked(target, **settings).answers(question).items()}


def _read(target: str) -> tuple[str, tuple[str, str | None] | None, str | Template, int]:
    """The base, the trained model with its adapter (None: there is only one model), the template, the length."""
    refuse_missing_folder("target", target)
    folder = Path(target)
    base = base_of_adapter(folder)
    run = folder if (folder / "config.yaml").exists() else folder.parent
    config = config_of(run) if run == folder or (base and (run / "config.yaml").exists()) else None
    if config:
        read = of_run.read(str(run))
        if read.tools:
            reason = f"was trained to call {', '.join(read.tools['tools'])}, and a question here is one turn"
            raise ConfigError("target", target, reason, "use grpo-math evaluate --run")
        return read.base, read.trained, read.template if config.get("prompt_template") else PLAIN, read.max_new_tokens
    if base:
        return base, (base, str(folder)), PLAIN, 512
    return target, None, PLAIN, 512


def _sides(base: str, trained: tuple[str, str | None] | None, only: str | None) -> dict[str, Side]:
    """The sides that are asked. An adapter's base is the same weights without it, and is loaded once."""
    if trained is None:
        return {"model": _loaded(base, None)}
    model, adapter = trained
    if adapter is None:
        names = {"base": base, "trained": model}
        return {name: _loaded(path, None) for name, path in names.items() if only in (None, name)}
    if only == "base":
        return {"base": _loaded(base, None)}
    side = _loaded(model, adapter)
    both = {"base": Side(side.model, side.tokenizer, adapter=False), "trained": side}
    return {name: one for name, one in both.items() if only in (None, name)}


def _loaded(model: str, adapter: str | None) -> Side:
    tokenizer = backends.loaded(model, load_tokenizer)
    backends.loaded(model, check_weights)
    return Side(backends.load_weights(model, adapter), tokenizer, adapter=True)
