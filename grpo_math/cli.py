"""The command ``grpo-math``: a list of commands, each in a module with ``add_arguments(parser)`` and ``run(args)``.

Every command that answers a question takes ``--json``: one object on stdout, and all else on stderr. Exit code 0: done;
1: the answer is no; 2: bad input, said in one line.

Does not import torch, transformers or trl before a command needs them: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from typing import Any, NamedTuple

from grpo_math import __version__
from grpo_math.errors import PushError, UserError, printed
from grpo_math.run import streams


class Command(NamedTuple):
    """``run(args)`` of ``module`` returns an `Answer` or an exit code."""

    module: str
    help: str
    answers: bool = True  # takes --json
    fields: bool = False  # takes the fields of a recipe, which run() finds as args.fields


COMMANDS = {
    "demo": Command(
        "train.demo", "evaluate, train and evaluate again on an embedded model and problems", answers=False, fields=True
    ),
    # These two read their arguments themselves: they hand most of them on.
    "train": Command("train.launcher", "train a recipe on this machine's GPUs or its CPU; --list shows the recipes"),
    "serve": Command("train.launcher", "only the vLLM server of a recipe, for training on another machine"),
    "doctor": Command(
        "checks.doctor", "what is wrong with a recipe on this machine; its prompts, token by token", fields=True
    ),
    "plan": Command("planner.command", "does a recipe fit these GPUs, and what to change", fields=True),
    "evaluate": Command("report.evaluated", "a model, adapter or run on a problem set, or two results compared"),
    "grade": Command("grade_command", "grade the rows {gold, prediction} of a .jsonl file"),
    "report": Command("report.reported", "a run, or several compared -> plots and one HTML page"),
    "ask": Command("report.conversation", "talk to a run, base and trained side by side, or to a model"),
    "export": Command("report.merged", "a run's adapter merged into its base: one model, in safetensors"),
    "push": Command("report.pushed", "a finished run -> a repository on the Hub"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = spelt(sys.argv[1:] if argv is None else argv)
    streams.ready()
    try:
        with streams.written():
            return _run(argv)
    except UserError as error:
        print(f"error: {printed(error)}", file=sys.stderr)
        return 1 if isinstance(error, PushError) else 2
    except streams.Closed as closed:
        return closed.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: list[str]) -> int:
    if not argv:
        _list().print_help()
        return 0
    name = _list().parse_args(argv[:1]).command
    _quiet()
    if name in ("train", "serve"):
        from grpo_math.train import here, launcher

        return launcher.serve(argv[1:]) if name == "serve" else launcher.train(argv[1:], here.train)
    parser = parser_of(name)
    args, fields = parser.parse_known_args(argv[1:])
    if fields and not COMMANDS[name].fields:
        raise _unknown(parser, fields[0])
    args.fields = fields
    try:
        answer = _module(name).run(args)
    except OSError as error:  # a file that the command names, or one beside it
        if error.filename is None or name == "demo":
            raise
        named = os.fsdecode(error.filename)
        raise UserError(f"{named}: {error.strerror}: see that it can be read and written") from None
    if isinstance(answer, int):
        return answer
    print(streams.json_text(answer.json) if args.json else answer.text)
    return 0 if answer.yes else 1


def spelt(argv: list[str]) -> list[str]:
    """Every option with underscores, whichever way it was written; what follows a ``--`` is another program's.

    >>> spelt(["plan", "--gpu-memory=8", "--cpu_memory", "a-b", "--", "--max-model-len"])
    ['plan', '--gpu_memory=8', '--cpu_memory', 'a-b', '--', '--max-model-len']
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words = [word.partition("=") for word in argv[:end]]
    own = [(f"--{name[2:].replace('-', '_')}" if name[:2] == "--" else name) + sign + x for name, sign, x in words]
    return own + argv[end:]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(f"{message}: see {self.prog} --help")


def _list() -> argparse.ArgumentParser:
    """Parse the command's name; ``--help`` lists the commands."""
    listed = "\n".join(f"  {name:<9} {command.help}" for name, command in COMMANDS.items())
    parser = _Parser(
        prog="grpo-math",
        description="GRPO for mathematics, on TRL and accelerate.",
        epilog=f"commands:\n{listed}\n\ngrpo-math COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"grpo_math {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    return parser


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command's arguments."""
    command = COMMANDS[name]
    parser = _Parser(prog=f"grpo-math {name}", description=command.help, allow_abbrev=False)
    _module(name).add_arguments(parser)
    if command.answers:
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser


def _module(name: str) -> Any:
    return importlib.import_module(f"grpo_math.{COMMANDS[name].module}")


def _unknown(parser: argparse.ArgumentParser, word: str) -> UserError:
    from grpo_math.settings.translate import hint

    name = word.partition("=")[0].removeprefix("--")
    known = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
    near = hint(name, known) if word.startswith("--") else ""
    return UserError(f"{word} is not an option of {parser.prog}: {near or f'see {parser.prog} --help'}")


def _quiet() -> None:
    """Leave the terminal to the progress bar and to what matters."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of its own renamings
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it offers a kernel of the Hub


if __name__ == "__main__":
    sys.exit(main())
