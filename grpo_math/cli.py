"""The command ``grpo-math``: a list of commands, each in a module with ``add_arguments(parser)`` and ``run(args)``.

Every command that answers a question takes ``--json``: one object on stdout, everything else on stderr. Exit code 0:
done; 1: the check failed (does not fit, doctor found an error); 2: bad input, explained in one line.

Does not import torch, transformers or trl before a command needs them: ``--help`` answers at once.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_math import __version__
from grpo_math.errors import PushError, UserError, first_line, printed, require_choice
from grpo_math.run.files import no_room
from grpo_math.system import streams


class Command(NamedTuple):
    """``run(args)`` of ``module`` returns an `Answer` or an exit code."""

    module: str
    help: str  # one sentence
    usage: str
    examples: tuple[str, str]
    answers: bool = True  # takes --json
    fields: bool = False  # takes recipe fields (args.fields)


COMMANDS = {
    "demo": Command(
        "train.demo",
        "Evaluate, train and evaluate again, on an embedded model.",
        "[--FIELD VALUE ...]",
        ("grpo-math demo", "grpo-math demo --output_dir runs/short --max_steps 10"),
        answers=False,
        fields=True,
    ),
    "train": Command(
        "train.launcher",
        "Train a recipe on this machine's GPUs or its CPU.",
        "RECIPE [--FIELD VALUE ...]",
        ("grpo-math train --list", "grpo-math train gsm8k_8gb --method dapo --output_dir runs/mine"),
        answers=False,
        fields=True,
    ),
    "serve": Command(
        "commands.serve",
        "Run a recipe's vLLM server for a training that runs elsewhere.",
        "RECIPE [--FIELD VALUE ...] [-- OPTION OF vllm serve ...]",
        ("grpo-math serve my_recipe.yaml --port 8000", "grpo-math serve my_recipe.yaml --check"),
        fields=True,
    ),
    "doctor": Command(
        "commands.doctor",
        "Check a recipe on this machine before it runs.",
        "RECIPE [--FIELD VALUE ...]",
        ("grpo-math doctor my_recipe.yaml", "grpo-math doctor my_recipe.yaml --show 2"),
        fields=True,
    ),
    "selftest": Command(
        "commands.selftest",
        "Compare training with stock TRL's on the installed versions.",
        "[options]",
        ("grpo-math selftest", "grpo-math selftest --only LoRA --json"),
    ),
    "attack": Command(
        "commands.attack",
        "Show what rewards pay for blind guesses.",
        "(RECIPE | REWARD) [--FIELD VALUE ...]",
        ("grpo-math attack my_recipe.yaml", "grpo-math attack --rewards format_strict --dataset gsm8k"),
        fields=True,
    ),
    "audit": Command(
        "commands.audit",
        "Find the rows of a data set that teach nothing or something wrong.",
        "(RECIPE | DATA) [--write_clean FILE] [--FIELD VALUE ...]",
        ("grpo-math audit --dataset gsm8k", "grpo-math audit --dataset gsm8k --write_clean clean.jsonl"),
        fields=True,
    ),
    "plan": Command(
        "commands.plan",
        "Check whether a recipe fits these GPUs, and what to change if not.",
        "RECIPE [--FIELD VALUE ...]",
        ("grpo-math plan gsm8k_8gb --card 3060", "grpo-math plan gsm8k_8gb --gpus 2 --gpu_memory 24"),
        fields=True,
    ),
    "evaluate": Command(
        "commands.evaluate",
        "Evaluate a model, adapter or run, or compare two results.",
        "(RUN_DIR | --model MODEL --data DATA) [options]",
        ("grpo-math evaluate runs/demo --data gsm8k --n 100", "grpo-math evaluate --compare a.json b.json"),
    ),
    "grade": Command(
        "commands.grade",
        "Grade a .jsonl file whose rows have a gold answer and a prediction.",
        "FILE [options]",
        ("grpo-math grade answers.jsonl", "grpo-math grade answers.jsonl --format boxed --jsonl"),
    ),
    "report": Command(
        "commands.report",
        "Write the report page and plots of a run, or compare several runs.",
        "RUN_DIR [RUN_DIR ...]",
        ("grpo-math report runs/demo", "grpo-math report runs/a runs/b"),
    ),
    "ask": Command(
        "commands.ask",
        "Ask a model, or a run's base and trained model side by side.",
        "TARGET [QUESTION] [options]",
        ('grpo-math ask runs/demo "What is 21 + 23?"', "grpo-math ask Qwen/Qwen2.5-0.5B-Instruct < questions.txt"),
    ),
    "export": Command(
        "commands.export",
        "Merge a run's adapter into its base, as safetensors or a GGUF file.",
        "RUN_DIR (--merge DIR | --gguf FILE) [options]",
        ("grpo-math export runs/demo --merge merged --checkpoint best", "grpo-math export runs/demo --gguf demo.gguf"),
    ),
    "push": Command(
        "commands.push",
        "Push a finished run to a repository on the Hub.",
        "RUN_DIR [options]",
        ("grpo-math push runs/demo", "grpo-math push runs/demo --repo_id me/demo --private"),
    ),
}

# The words after an option are its known values, else names of files.
COMPLETION = """\
type compdef > /dev/null 2>&1 || [ -z "$ZSH_VERSION" ] || {{ autoload -Uz compinit && compinit; }}
[ -z "$ZSH_VERSION" ] || {{ autoload -Uz bashcompinit && bashcompinit; }}
_grpo_math() {{
  local words word option
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" = 1 ]; then words="{commands}"; fi
  for word in "${{COMP_WORDS[@]:1:$COMP_CWORD-1}}"; do case "$word" in --*) option="${{word//-/_}}" ;; esac; done
  case "$option ${{COMP_WORDS[$COMP_CWORD]}}" in
    *" -"*) ;;
{values}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _grpo_math grpo-math"""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = normalize_options(sys.argv[1:] if argv is None else argv)
    streams.ready()
    try:
        code = _run(argv)
        # Flushing notices a closed pipe inside this block, and not when the interpreter exits.
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {printed(error)}", file=sys.stderr)
        return 1 if isinstance(error, PushError) else 2
    except BrokenPipeError:  # the reader, such as head, has ended
        # The interpreter flushes the remaining output when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return streams.CLOSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: list[str]) -> int:
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    if not argv or argv[0].startswith("-"):
        if _list().parse_args(argv or ["--help"]).completion:
            print(completion())
        return 0
    name, *words = argv
    require_choice("command", name, ("help", *COMMANDS))
    command = COMMANDS[name]
    streams.quiet()
    # The words after -- are for another program.
    end = words.index("--") if "--" in words else len(words)
    words, after_dashes = words[:end], words[end + 1 :]
    parser = command_parser(name)
    # Without recipe fields, options may be between the words.
    args, fields = (
        parser.parse_known_args(recipe_first(parser, words))
        if command.fields
        else parser.parse_known_intermixed_args(words)
    )
    args.fields = fields
    args.after_dashes = after_dashes
    if fields and not command.fields:
        raise _unknown(parser, fields[0])
    if after_dashes and name != "serve":
        raise _unknown(parser, "--")
    try:
        answer = _module(name).run(args)
    except Exception as error:
        # demo and train report the files of a run themselves (run/failures.py).
        if name in ("demo", "train"):
            raise
        if isinstance(error, OSError) and error.filename:  # a file that the command names, or a file next to it
            named = os.fsdecode(error.filename)
            raise UserError(f"{named}: {error.strerror}: check that it can be read and written") from None
        if cause := no_room(error):
            raise UserError(f"a file could not be written ({first_line(cause)}): free space, then try again") from None
        raise
    if isinstance(answer, int):
        return answer
    print(json.dumps(answer.json) if args.json else answer.text)
    return 0 if answer.yes else 1


def normalize_options(argv: list[str]) -> list[str]:
    """Return the words with underscores in each option. The words after ``--`` are for another program and stay.

    >>> normalize_options(["plan", "--gpu-memory=8", "--cpu_memory", "a-b", "--", "--max-model-len"])
    ['plan', '--gpu_memory=8', '--cpu_memory', 'a-b', '--', '--max-model-len']
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words = [word.partition("=") for word in argv[:end]]
    ours = [(f"--{name[2:].replace('-', '_')}" if name[:2] == "--" else name) + sign + x for name, sign, x in words]
    return ours + argv[end:]


def recipe_first(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Return the words with the recipe as ``--config RECIPE`` at the front.

    The recipe is the first word that no option takes. A field may take many words, so that a word too many is reported
    as such: after its first value, only a file or a shipped recipe is the recipe.

    >>> recipe_first(command_parser("serve"), ["--check", "mine.yaml", "--seed", "3"])
    ['--config', 'mine.yaml', '--check', '--seed', '3']
    """
    from grpo_math.settings.recipe import OPTIONS, is_switch
    from grpo_math.settings.shipped import is_file

    if any(word.partition("=")[0] == "--config" for word in words):
        return words
    options = {name[2:]: 0 if action.nargs == 0 else 1 for name, action in parser._option_string_actions.items()}
    taken, may_take_more = 0, False  # words that the last option takes
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, equals, _ = word[2:].partition("=")
            may_take_more = not equals and name not in (*options, *OPTIONS)
            taken = 0 if equals or is_switch(name, words[i + 1 : i + 2]) else options.get(name, 1)
        elif taken or word.startswith("-") or (may_take_more and not is_file(word)):  # -1, -h
            taken = 0
        else:
            return ["--config", word, *words[:i], *words[i + 1 :]]
    return words


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        # The recipe may be given without its option.
        raise UserError(f"{message.replace('required: --config', 'required: RECIPE')}: see {self.prog} --help")


def _list() -> argparse.ArgumentParser:
    """Return the parser of ``grpo-math`` without a command: ``--help`` lists the commands."""
    listed = "\n".join(f"  {name:<9} {command.help}" for name, command in COMMANDS.items())
    parser = _Parser(
        prog="grpo-math",
        usage="grpo-math COMMAND ...",
        description="Train language models on mathematics with GRPO.",
        epilog=f"commands:\n{listed}\n\ngrpo-math COMMAND --help shows the options of a command.",
        formatter_class=_format,
    )
    parser.add_argument("--version", action="version", version=f"grpo_math {__version__}")
    parser.add_argument("--completion", action="store_true", help="print a script that completes words in bash and zsh")
    return parser


def completion() -> str:
    """Return a shell script with every command, option and known value, so that the Tab key starts no Python."""
    from grpo_math.rewards import REWARDS
    from grpo_math.settings.fields import fields
    from grpo_math.settings.recipe import METHODS
    from grpo_math.settings.shipped import listed

    recipes = [*listed("launch/configs")]
    cases = []
    for name, command in COMMANDS.items():
        options = [*_options(command_parser(name)), *(fields() if command.fields else ())]
        words = " ".join([*(f"--{option}" for option in dict.fromkeys(options)), *(recipes if command.fields else ())])
        cases.append(f'    {name}) words="{words}" ;;')
    known: dict[str, Sequence[str]] = {
        name: choices for name, field in fields().items() if (choices := field.facts.get("choices"))
    }
    known |= {"config": recipes, "method": [*METHODS], "rewards": [*REWARDS]}
    values = [f'    __{name}" "*) words="{" ".join(choices)}" ;;' for name, choices in known.items()]
    names = " ".join([*COMMANDS, "help"])
    return COMPLETION.format(commands=names, cases="\n".join(cases), values="\n".join(values))


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command's arguments."""
    command = COMMANDS[name]
    parser = _Parser(
        prog=f"grpo-math {name}",
        usage=f"grpo-math {name} {command.usage}",
        description=command.help,
        epilog="\n  ".join(("examples:", *command.examples)),
        formatter_class=_format,
        # argparse would take --gpu for --gpus. Instead, a mistyped option is an error that names the nearest option.
        allow_abbrev=False,
    )
    _module(name).add_arguments(parser)
    if command.answers:
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser


def _format(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=80)


def _module(name: str) -> Any:
    return importlib.import_module(f"grpo_math.{COMMANDS[name].module}")


def _options(parser: argparse.ArgumentParser) -> list[str]:
    # argparse has no public list of a parser's options.
    return [option[2:] for option in parser._option_string_actions if option.startswith("--")]


def _unknown(parser: argparse.ArgumentParser, word: str) -> UserError:
    from grpo_math.settings.translate import hint

    word = word.partition("=")[0]  # the value may be a token
    name = word.removeprefix("--")
    near = hint(name, _options(parser)) if word.startswith("--") else ""
    return UserError(f"{word} is not an option of {parser.prog}: {near or f'see {parser.prog} --help'}")


if __name__ == "__main__":
    sys.exit(main())
