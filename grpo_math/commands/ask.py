"""`grpo-math ask`: answers -> the terminal, one below the other, as they come.

The text of a model is shown as text alone: a control character appears as its code, and moves no cursor.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

from grpo_math.checks.check_services import cache_only
from grpo_math.errors import ConfigError, UserError, escaped
from grpo_math.generation.models import adapter_base, refuse_missing_folder
from grpo_math.run.resume import run_config
from grpo_math.system.gpus import use_one_gpu
from grpo_math.system.streams import Answer, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="a run directory, an adapter's folder, or a model: a folder, a Hub id, or 'embedded'")
    add("question", nargs="?", help="the question (default: each line of a pipe)")
    add("--checkpoint", help="of a run: best, or a folder (default: the last)")
    add("--only", choices=("base", "trained"), help="ask only this model")
    add("--template", help="the prompt, or 'plain' (default: the run's, or plain)")
    add("--max_completion_length", type=int, metavar="N", help="tokens of an answer (default: the run's, or 512)")
    add("--temperature", type=float, metavar="T", default=0.0, help="(default: 0, which is greedy)")
    add("--seed", type=int, default=0, help="of sampling (default: 0)")


def run(args: argparse.Namespace) -> Answer | int:
    """Answer `grpo-math ask`: one question, or each line of a pipe."""
    if args.json and args.question is None:
        raise UserError("--json answers one question: give it behind the run or model")
    if not 0 <= args.temperature < float("inf"):
        raise ConfigError("temperature", args.temperature, "is out of range", "0 is greedy, above 0 samples")
    if args.max_completion_length is not None and args.max_completion_length < 1:
        raise ConfigError("max_completion_length", args.max_completion_length, "is out of range", "give 1 or more")
    refuse_missing_folder("target", args.target)
    piped = () if args.question is not None or sys.stdin.isatty() else sys.stdin
    questions = [args.question] if args.question is not None else [line.strip() for line in piped if line.strip()]
    if not questions:
        raise UserError("the question is missing: give it behind the run or model, or pipe one on each line")
    base = (run_config(Path(args.target)) or {}).get("model_name_or_path") or adapter_base(args.target) or args.target
    if note := cache_only([], base):
        say("hub", note)
    use_one_gpu()
    # This imports torch, which takes seconds: wrong arguments are reported before.
    from grpo_math.evaluation.ask import LoadedModels

    models = LoadedModels(args.target, args.only, args.template, args.max_completion_length, args.checkpoint)
    if args.json:
        answers = {name: models.answer(name, args.question, args.temperature, args.seed) for name in models.models}
        truncated = sorted(name for name, answer in answers.items() if answer.truncated)
        texts = {name: answer.text for name, answer in answers.items()}
        known = {"question": args.question, "template": models.template}
        return Answer({**known, "answers": texts, "truncated": truncated}, "")

    for question, name in product(questions, models.models):
        if len(models.models) > 1:
            print(f"{name}:")
        completion = models.answer(name, question, args.temperature, args.seed, show)
        print()
        if completion.truncated:
            print("(cut at the token limit: --max_completion_length N allows more)")
    return 0


def show(text: str) -> None:
    print(escaped(text, keep="\n\t"), end="", flush=True)
