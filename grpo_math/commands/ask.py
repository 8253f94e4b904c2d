"""`grpo-math ask`: streams of text -> the terminal, one below the other, as they come.

The text of a model is shown as text alone: a control character appears as its code, and moves no cursor.
"""

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping

from grpo_math.errors import ConfigError, UserError, escaped
from grpo_math.system.streams import Answer

HELP = "/new forgets the conversation, /help shows this line, Ctrl-C cuts an answer, Ctrl-D exits"
Streams = Mapping[str, Iterator[str]]  # the pieces of an answer, by the name of the model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="a run directory, an adapter's folder, or a model: a folder, a Hub id, or 'embedded'")
    add("question", nargs="?", help="answer this and exit (default: a conversation)")
    add("--checkpoint", help="of a run: best, or a folder (default: the last)")
    add("--only", choices=("base", "trained"), help="ask only this model")
    add("--template", help="the prompt, or 'plain' (default: the run's, or plain)")
    add("--max_completion_length", type=int, metavar="N", help="tokens of an answer (default: the run's, or 512)")
    add("--temperature", type=float, metavar="T", default=0.0, help="(default: 0, which is greedy)")
    add("--seed", type=int, default=0, help="of sampling (default: 0)")


def run(args: argparse.Namespace) -> Answer | int:
    """Answer `grpo-math ask`: one question, or a conversation."""
    if args.json and args.question is None:
        raise UserError("--json answers one question: give it behind the run or model")
    if not 0 <= args.temperature < float("inf"):
        raise ConfigError("temperature", args.temperature, "is out of range", "0 is greedy, above 0 samples")
    if args.max_completion_length is not None and args.max_completion_length < 1:
        raise ConfigError("max_completion_length", args.max_completion_length, "is out of range", "give 1 or more")
    # This imports torch, which takes seconds: wrong arguments are reported before.
    from grpo_math.evaluation.ask import LoadedModels

    models = LoadedModels(args.target, args.only, args.template, args.max_completion_length, args.checkpoint)

    def ask(question: str) -> Streams:
        return models.answers(question, args.temperature, args.seed)

    if args.json:
        texts = {name: "".join(pieces) for name, pieces in ask(args.question).items()}
        known = {"question": args.question, "template": models.template}
        return Answer({**known, "answers": texts, "truncated": sorted(models.truncated)}, "")
    if args.question is not None:
        print_answers(ask(args.question), models.truncated)
        return 0
    print(f"template {models.template}, at most {models.max_new_tokens} tokens; {HELP}")
    converse(lambda question: print_answers(ask(question), models.truncated), models.forget)
    return 0


def print_answers(streams: Streams, truncated: Collection[str] = ()) -> None:
    """Print the answer of each model as it comes. The end of a stream adds its name to ``truncated`` if it was cut.

    >>> print_answers({"base": iter(["It is ", "54."]), "trained": iter(["#### 55"])}, ["base"])
    base:
    It is 54.
    (cut at the token limit: --max_completion_length N allows more)
    trained:
    #### 55
    """
    for name, pieces in streams.items():
        if len(streams) > 1:
            print(f"{name}:")
        for piece in pieces:
            print(escaped(piece, keep="\n\t"), end="", flush=True)
        print()
        if name in truncated:
            print("(cut at the token limit: --max_completion_length N allows more)")


def converse(answer: Callable[[str], None], forget: Callable[[], None]) -> None:
    """Answer questions from the terminal until its end (Ctrl-D). Ctrl-C cuts an answer short."""
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print()
            return
        if question == "/new":
            forget()
        elif question == "/help":
            print(HELP)
        elif question:
            try:
                answer(question)
            except KeyboardInterrupt:
                print("\n(cut)")
