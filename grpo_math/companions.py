"""The commands beside a run: ask it, export it, list and copy the shipped recipes, make vLLM's environment.

Each function returns the JSON answer and the text of a command, or None where it has printed by itself.

Does not train or evaluate, and does not import torch before a command needs it.
"""

from __future__ import annotations

import argparse
from typing import Any

from grpo_math.errors import ConfigError, UserError

Answer = tuple[dict[str, Any], str]
COMMANDS = {
    "ask": "talk to a run, base and trained side by side, or to a model, in the terminal",
    "export": "a run's adapter merged into its base: one model, in safetensors",
    "recipes": "the recipes and accelerate configs that are shipped; --copy NAME makes one your own",
    "vllm-env": "make the environment that a vLLM server runs in, and print the path of its vllm",
}
DEMO_TAKES = "This takes about 7 minutes of CPU time, as measured on one core of an AMD EPYC."


def options(name: str, parser: argparse.ArgumentParser) -> None:
    """Add the options of one of `COMMANDS` to its parser."""
    add = parser.add_argument
    if name == "ask":
        add("target", help="a run directory, an adapter's folder, or a model: a folder, a Hub id, or 'embedded'")
        add("question", nargs="?", help="answer this and end (default: a conversation)")
        add("--only", choices=("base", "trained"), help="leave the other one out")
        add("--template", help="the prompt, or 'plain' (default: the run's, or plain)")
        add("--max_new_tokens", type=int, help="(default: the run's max_completion_length, or 512)")
        add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
        add("--seed", type=int, default=0)
    elif name == "export":
        add("run_dir")
        add("--merge", metavar="DIR", required=True, help="the folder to make")
        add("--dtype", default="bfloat16", help="bfloat16 (default) or float32")
    elif name == "recipes":
        add("--copy", metavar="NAME", help="copy this one into the current folder")
    elif name == "vllm-env":
        add("folder", nargs="?", default=".venv-vllm", help="where it is made (default: .venv-vllm)")


def run(args: argparse.Namespace) -> Answer | None:
    """Do what one of `COMMANDS` is for."""
    return {"ask": _ask, "export": _export, "recipes": _recipes, "vllm-env": _vllm_env}[args.command](args)


def with_base(model: str | None, adapter: str | None) -> tuple[str | None, str | None]:
    """Model and adapter of an evaluation: an adapter's folder that is given as the model names its base itself."""
    from grpo_math.generation.models import base_of_adapter

    base = base_of_adapter(model) if model else None
    if base and adapter:
        raise ConfigError("model", model, "is an adapter itself", "leave out --adapter, or name its base")
    return (base, model) if base else (model, adapter)


def _ask(args: argparse.Namespace) -> Answer | None:
    if args.json and args.question is None:
        raise UserError("--json answers one question: give it behind the run or model")
    from grpo_math.evaluation.ask import Asked
    from grpo_math.report import conversation

    asked = Asked(args.target, args.only, args.template, args.max_new_tokens)

    def answers(question: str) -> conversation.Streams:
        return asked.answers(question, args.temperature, args.seed)

    if args.json:
        said = {name: "".join(pieces) for name, pieces in answers(args.question).items()}
        return {"question": args.question, "template": asked.template, "answers": said}, ""
    if args.question is not None:
        conversation.answer(answers(args.question))
        return None
    print(f"template {asked.template}, at most {asked.max_new_tokens} tokens; /new forgets what was said, Ctrl-D ends")
    conversation.converse(answers, asked.forget)
    return None


def _export(args: argparse.Namespace) -> Answer:
    from grpo_math.report.merged import export, next_steps

    merged = export(args.run_dir, args.merge, args.dtype)
    answer = {"folder": str(merged.folder), "apart": merged.apart, "moved": merged.moved}
    said = (
        f"within {merged.apart:.3f} nats a token of base and adapter; the adapter moves the base by {merged.moved:.3f}"
    )
    return answer, f"merged   {merged.folder}: {said}\n{next_steps(merged.folder)}"


def _recipes(args: argparse.Namespace) -> Answer:
    from grpo_math.settings import shipped

    if args.copy is not None:
        copied = shipped.copy(args.copy)
        return {"copied": str(copied)}, f"copied   {copied}"
    recipes, configs = (shipped.listed(folder) for folder in ("launch/configs", "accelerate_configs"))
    lines = [f"{name:<24} {about}" for name, (_, about) in recipes.items()]
    lines += [
        "",
        "grpo-math train --config launch/configs/NAME.yaml, from any folder; or --copy NAME, and edit it.",
        "",
    ]
    lines += [f"{name:<24} {path}" for name, (path, _) in configs.items()]
    lines += ["", "grpo-math train --accelerate_config NAME; accelerate launch --config_file takes the path."]
    paths = [{name: str(path) for name, (path, _) in of_kind.items()} for of_kind in (recipes, configs)]
    return {"recipes": paths[0], "accelerate_configs": paths[1]}, "\n".join(lines)


def _vllm_env(args: argparse.Namespace) -> Answer:
    from grpo_math.train.vllm_env import make

    made = make(args.folder)
    return {"vllm": str(made)}, str(made)
