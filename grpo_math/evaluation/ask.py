"""A run, an adapter or a model -> models that answer questions, base and trained, as in the run."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.evaluation import from_run
from grpo_math.evaluation.engines import Model, check_chat
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import token_ids, with_model
from grpo_math.generation.models import adapter_base, refuse_missing_folder
from grpo_math.generation.request import Request
from grpo_math.problems.prompts import AS_IS, Template, as_template
from grpo_math.run.resume import run_config

ModelAndAdapter = tuple[str, str | None]  # a model and its adapter
NO_TEMPLATE = "plain"  # the question without a template, as a chat message if the model has a chat template


class LoadedModels:
    """The base and the trained model of ``target``, loaded and ready to answer.

    ``target`` is a run directory, the folder of an adapter, or a model (a folder, a Hub id, 'embedded'), which has only
    one side. ``only`` names the side to load, and ``checkpoint`` the trained weights of a run. ``template`` and
    ``max_new_tokens`` default to those of the run.
    """

    def __init__(
        self,
        target: str,
        only: str | None = None,
        template: str | None = None,
        max_new_tokens: int | None = None,
        checkpoint: str | None = None,
    ) -> None:
        models, template_of_run, request = _read(target, checkpoint)
        template_name = template_of_run if template is None else template
        self.template = str(template_name)
        self.prompt_of = None if template_name == NO_TEMPLATE else as_template(template_name).prompt
        self.max_new_tokens = request.max_new_tokens if max_new_tokens is None else max_new_tokens
        self.request = replace(request, template=self.template, max_new_tokens=self.max_new_tokens)
        if only is not None and only not in models:
            raise ConfigError("only", only, f"would be ignored: {target} is one model", "leave it out")
        self.models = _loaded({only: models[only]} if only else models, request)

    def answer(
        self,
        name: str,
        question: str,
        temperature: float = 0.0,
        seed: int = 0,
        show: Callable[[str], None] | None = None,
    ) -> Completion:
        """Return the answer of a side, and pass its text to ``show`` as it comes."""
        prompt, model = self._prompt(name, question), self.models[name]
        (ids,) = token_ids(model.tokenizer, [prompt], template_kwargs=self.request.template_kwargs)
        request = replace(self.request, temperature=temperature)
        # The base of a new adapter is the same model without it.
        is_base = name == "base" and model is self.models.get("trained")
        with model.weights.disable_adapter() if is_base else nullcontext():
            (completion,) = with_model(model.weights, model.tokenizer, request, show)([ids], seed)
        return completion

    def _prompt(self, name: str, question: str) -> Any:
        tokenizer = self.models[name].tokenizer
        if self.prompt_of is None:
            return [{"role": "user", "content": question}] if tokenizer.chat_template else question
        prompt = self.prompt_of(question)
        if not isinstance(prompt, str):
            check_chat(name, tokenizer, prompt, self.request.template_kwargs)
        return prompt


def _read(target: str, checkpoint: str | None) -> tuple[dict[str, ModelAndAdapter], str | Template, Request]:
    """Return the models, the template and the request."""
    refuse_missing_folder("target", target)
    if config := run_config(Path(target)):
        run = from_run.read(target, checkpoint=checkpoint)
        # A script may have its own prompts, which no template makes.
        has_template = config.get("prompt_template") not in (None, AS_IS)
        return run.models, run.template if run.template and has_template else NO_TEMPLATE, run.request
    if checkpoint is not None:
        raise ConfigError("checkpoint", checkpoint, f"would be ignored: {target} is not a run", "leave it out")
    # An adapter's folder does not contain the prompt that the adapter was trained with.
    if base := adapter_base(target):
        return {"base": (base, None), "trained": (base, target)}, NO_TEMPLATE, Request()
    return {"model": (target, None)}, NO_TEMPLATE, Request()


def _loaded(models: dict[str, ModelAndAdapter], request: Request) -> dict[str, Model]:
    """Load the models now, so that an error comes before the first question.

    An adapter's base is the same weights without the adapter, and is loaded once. A run that has trained an adapter
    further has two adapters.
    """
    if len(models) == 2 and models["base"][1] is None and models["trained"][1] is not None:
        models = dict.fromkeys(models, models["trained"])
    opened = {names: Model(*names, request=request) for names in models.values()}
    for model in opened.values():
        model.check("")
        _ = model.tokenizer, model.weights
    return {name: opened[names] for name, names in models.items()}
