"""The command ``grpo-math``. Every command that answers something takes ``--json``: one object on stdout, and all else
on stderr. Exit code 0: done; 1: the answer is no; 2: bad input, said in one line.

Does not import torch, transformers or trl before a command needs them: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_math import __version__, companions
from grpo_math.errors import ConfigError, PushError, UserError, printed
from grpo_math.run import streams
from grpo_math.run.signals import Stop
from grpo_math.settings.shipped import find

if TYPE_CHECKING:
    from grpo_math.settings.recipe import Recipe

Commands = Any  # what add_subparsers returns, which argparse has no public name for
Run = Callable[[argparse.Namespace, list[str]], int]
DEMO = "launch/configs/demo_cpu.yaml"  # found from any folder, and no path of this machine in the run's command
SHOWN = (  # of an evaluation's results
    *("n", "accuracy", "ci95", "accuracy_in_format", "mean@n", "pass@k", "maj@k", "categories"),
    *("calling", "by_subject", "by_level", "contamination", "seconds", "results"),
)


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
        _parser().print_help()
        return 0
    if argv[:1] in (["train"], ["serve"]):  # their settings are the training program's own
        return _launch(*argv)
    args, rest = _parser().parse_known_args(argv)
    if rest and args.command not in ("demo", "doctor", "plan"):
        raise _unknown(args, rest[0])
    from grpo_math.settings.accelerate import whole_numbers

    whole_numbers()
    try:
        return args.act(args, rest)
    except OSError as error:  # a file that the command names, or one beside it
        if error.filename is None or args.command == "demo":
            raise
        named = os.fsdecode(error.filename)
        raise UserError(f"{named}: {error.strerror}: see that it can be read and written") from None


def spelt(argv: list[str]) -> list[str]:
    """Every option with underscores, whichever way it was written; what follows a ``--`` is another program's.

    >>> spelt(["plan", "--gpu-memory=8", "--cpu_memory", "a-b", "--", "--max-model-len"])
    ['plan', '--gpu_memory=8', '--cpu_memory', 'a-b', '--', '--max-model-len']
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words = [word.partition("=") for word in argv[:end]]
    own = [(f"--{name[2:].replace('-', '_')}" if name[:2] == "--" else name) + sign + x for name, sign, x in words]
    return own + argv[end:]


def _unknown(args: argparse.Namespace, word: str) -> UserError:
    from grpo_math.settings.recipe import hint

    command, name = f"grpo-math {args.command}", word.partition("=")[0].removeprefix("--")
    known = [option[2:] for option in args.parser._option_string_actions if option.startswith("--")]
    near = hint(name, known) if word.startswith("--") else ""
    return UserError(f"{word} is not an option of {command}: {near or f'see {command} --help'}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(f"{message}: see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="grpo-math", description="GRPO for mathematics, on TRL and accelerate.")
    parser.add_argument("--version", action="version", version=f"grpo_math {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="evaluate, train and evaluate again on an embedded model and problems")
    demo.add_argument("--output_dir", default="runs/demo", help="the run directory (default: runs/demo)")
    demo.epilog = "Any other setting of the training program may follow, for example --seed 1 --max_steps 40."
    demo.set_defaults(act=_demo)
    # Only for the list: main() hands everything after these two to train/launcher.py.
    train = "train on this machine's GPUs, or its CPU: grpo-math train --config RECIPE.yaml [--FIELD VALUE]"
    commands.add_parser("train", help=train)
    commands.add_parser("serve", help="only the vLLM server of a recipe, for training on another machine")
    doctor = _command(commands, "doctor", _doctor, "what is wrong with a recipe on this machine", abbreviates=False)
    asked = doctor.add_mutually_exclusive_group(required=True)
    asked.add_argument("--config", help="a recipe, as for train; its settings may follow, as there")
    asked.add_argument("--table", action="store_true", help="the tables of all checks, as Markdown")
    doctor.add_argument("--deep", action="store_true", help="ask the model too: KL, completions, log-probs")
    doctor.add_argument("--accelerate_config", help="a file, or the name of one in accelerate_configs/")
    _add_on_problems(commands)
    _add_on_runs(commands)
    _add_on_machines(commands)
    return parser


def _command(commands: Commands, name: str, run: Run, text: str, abbreviates: bool = True) -> argparse.ArgumentParser:
    """The parser of a command that answers on stdout."""
    parser = commands.add_parser(name, help=text, allow_abbrev=abbreviates)
    parser.set_defaults(act=run, parser=parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser


def _add_on_problems(commands: Commands) -> None:
    text = "a model, adapter or run on a problem set, or two results compared"
    add = _command(commands, "evaluate", _evaluate, text).add_argument
    add("--run", metavar="RUN_DIR", help="a finished run: its base and what it trained, compared")
    add("--model", help="a folder, a Hub id, or 'embedded'")
    add("--adapter", help="a folder with a LoRA adapter")
    data = "sets by name (such as gsm8k), owner/name[:config][@revision], folders or .jsonl files; several: a,b,c"
    add("--data", "--dataset", help=data)
    add("--suite", help="math: the sets that are usual, each as its authors evaluate it")
    add("--columns", help="which column is which: problem=query,answer=target (default: the common spellings)")
    add("--skip_bad_rows", action="store_true", help="count and report bad rows instead of stopping")
    add("--split", default="test", help="(default: test; it may be cut: train[:500])")
    add("--n", type=int, help="how many problems, drawn by --seed (default: all)")
    add("--template", help="the prompt and its answer format (default: the run's, or the data set's own)")
    add("--tools", help="what it may call: python, or module:function; several: a,b (default: the run's, or nothing)")
    add("--python", metavar="JSON", help='its limits, as {"wall_seconds": 5} (default: the run\'s)')
    add("--samples", type=int, help="completions of each problem (default: 1; 32 for AIME and AMC)")
    add("--temperature", type=float, help="0 is greedy (default: 0; 0.6 for AIME and AMC)")
    longest: dict[str, Any] = {"dest": "max_new_tokens", "help": "tokens of one (default: the run's, or 512)"}
    add("--max_completion_length", "--max_new_tokens", type=int, **longest)
    add("--batch_size", type=int, default=32, help="completions at a time (default: 32)")
    add("--seed", type=int, default=0)
    add("--backend", default="hf", help="hf (default), vllm-server or vllm")
    add("--server", metavar="URL", help="of the vLLM server")
    add("--contamination", metavar="TRAIN_DATA[:SPLIT]", help="how many problems overlap with a training set (:train)")
    where = "(default: evaluations, or evaluation in the run)"
    add("--output", help=f"the results file, ending in .json, or a folder for one that the settings name {where}")
    add("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="two results files, and nothing else")
    text = "grade a results file's answers anew, without a model, into a file beside it"
    add("--regrade", metavar="RESULTS", help=text)
    add = _command(commands, "grade", _grade, "grade the rows {gold, prediction} of a .jsonl file").add_argument
    add("file")
    add("--format", help="the answer format that was asked for (default: any)")
    add("--timeout", type=float, default=5.0, help="seconds for one answer (default: 5)")
    digits = "a decimal of so many significant digits may stand for an exact number (default: 12; 0: never)"
    add("--no_percent_as_number", action="store_true", help="25%% answers 0.25 and not 25")
    add("--digits", type=int, default=12, metavar="N", help=digits)
    add("--no_last_box", action="store_true", help="different boxes are several answers; else the last one counts")


def _add_on_runs(commands: Commands) -> None:
    text = "a run directory -> plots and one HTML page; of several, one page that compares them"
    add = _command(commands, "report", _report, text).add_argument
    add("run_dir", nargs="+")
    add("--watch", action="store_true", help="draw it anew until the run has ended; the page reloads itself")
    add("--every", type=int, metavar="SECONDS", help="how often --watch draws it (default: 30)")
    add("--output", metavar="FILE.html", help="of several runs (default: comparison.html beside them)")
    for name, text in companions.COMMANDS.items():
        companions.options(name, _command(commands, name, _companion, text))
    text = "a finished run -> a repository on the Hub"
    add = _command(commands, "push", _push, text, abbreviates=False).add_argument
    add("run_dir")
    add("--repo_id", help="user/name (default: the run directory's name, under your own)")
    add("--private", action="store_true", help="make a private repository")
    add("--merge", action="store_true", help="the whole model: the base in bfloat16 with the adapter in it")
    add("--base_model", help="the base's name on the Hub, where the run was trained from a folder")
    add("--revision", help="push to this branch (default: main)")
    add("--dry_run", "--dry-run", action="store_true", help="show the card and the files, and push nothing")


def _add_on_machines(commands: Commands) -> None:
    text = "does a recipe fit these GPUs, without loading weights, and what to change"
    plan = _command(commands, "plan", _plan, text, abbreviates=False)
    asked, add = plan.add_mutually_exclusive_group(required=True), plan.add_argument
    asked.add_argument("--config", help="a recipe, as for train; its settings may follow, as there")
    asked.add_argument("--table", action="store_true", help="a table: models on common GPUs")
    add("--gpus", type=int, help="how many GPUs (default: those of this machine)")
    add("--gpu_memory", type=float, metavar="GB", help="memory of one GPU (default: of this machine's)")
    add("--cpu_memory", type=float, metavar="GB", help="main memory (default: this machine's)")
    add("--prompt_tokens", type=int, help="the longest prompt (default: 512)")
    add("--accelerate_config", help="for DeepSpeed's settings: a file, or a name in accelerate_configs/")
    add("--simulate", action="store_true", help="run the recipe's own trainer without weights or memory: minutes")
    add = _command(commands, "bench", _bench, "what an update takes on this machine, stock TRL and ours").add_argument
    add("what", choices=["update"])
    add("--model", default="embedded", help="a folder, a Hub id, 'embedded' (default) or 'qwen2-small'")
    add("--shapes", help="comma-separated: gsm8k,short,math,degenerate,equal,one_token_prompt (all)")
    add("--runs", type=int, default=5, help="timed runs of each trainer (default: 5)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--lora_r", type=int, default=16, help="rank of the adapter; 0 trains all weights (default: 16)")
    add("--no_gradient_checkpointing", action="store_true", help="faster, in more memory")
    add("--seed", type=int, default=0)


def _demo(args: argparse.Namespace, rest: list[str]) -> int:
    if not args.output_dir:
        raise ConfigError("output_dir", "", "is missing", "name the folder that the run writes to")
    run_dir = Path(args.output_dir)
    arguments = ["--config", DEMO, "--output_dir", str(run_dir), *rest]
    if os.path.exists(run_dir / "after.json"):
        number = next(n for n in range(1, 1000) if not run_dir.with_name(f"{run_dir.name}.{n}").exists())
        run_dir.rename(earlier := run_dir.with_name(f"{run_dir.name}.{number}"))
        print(f"The earlier run is kept in {earlier}.", file=sys.stderr)
    if not rest:
        print(companions.DEMO_TAKES, file=sys.stderr)
    if (code := _train(arguments)) == 0:
        asked = f'grpo-math ask {run_dir} "What is 21 + 23?"'
        print(f"next     ask the trained model something of your own:\n         {asked}")
    return code


def _launch(command: str, *argv: str) -> int:
    from grpo_math.train import launcher

    if command == "serve":
        return launcher.serve(argv)
    _quiet()
    return launcher.train(argv, _train)


def _train(argv: list[str], read: Recipe | None = None) -> int:
    _quiet()
    with Stop(at_once=True):  # torch takes seconds to import
        if not {"-h", "--help"} & set(argv):
            from grpo_math.checks.preflight import refuse_early
            from grpo_math.settings import recipe

            read = read or recipe.read(argv)
            refuse_early(read)
        from grpo_math.train.program import main as train

        return train(argv, read)


def _evaluate(args: argparse.Namespace, rest: list[str]) -> int:
    if args.compare:
        return _compare(args)
    if args.regrade:
        return _regrade(args)
    args.model, args.adapter = companions.with_base(args.model, args.adapter)
    for name in ("model", "adapter"):
        if args.run and getattr(args, name) is not None:
            raise UserError(f"--{name} would be ignored by --run: leave it out")
    if args.model is None and not args.run:
        raise UserError("--model is missing: give a model and data, or two results files with --compare")
    _quiet()
    from grpo_math.report import evaluated

    try:
        every = evaluated.results(args)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    return _answer(args, *evaluated.answer(every, SHOWN))


def _compare(args: argparse.Namespace) -> int:
    from grpo_math.evaluation.compare import comparison, read_results
    from grpo_math.report.terminal import text_of

    _refuse_others(args, "compare")
    before, after = map(read_results, args.compare)
    answer = comparison(before, after)
    return _answer(args, answer, text_of(before, after, answer))


def _regrade(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from grpo_math.evaluation import figures, regrade

    _refuse_others(args, "regrade")
    with tqdm(desc="grading", unit="answer", delay=2) as bar:
        results = regrade.regrade(args.regrade, progress=lambda n: bar.update(n) and None)
    shown = {name: results[name] for name in ("regraded", *SHOWN) if name in results}
    text = "\n".join([figures.text_of(results), regrade.text_of(results), f"results   {results['results']}"])
    return _answer(args, shown, text)


def _refuse_others(args: argparse.Namespace, asked: str) -> None:
    """Of `evaluate`, what this option would ignore."""
    for name, value in vars(args).items():
        if name not in (asked, "json", "command", "act", "parser") and value != args.parser.get_default(name):
            raise UserError(f"--{name} would be ignored by --{asked}: leave it out")


def _grade(args: argparse.Namespace, rest: list[str]) -> int:
    from tqdm import tqdm

    from grpo_math.grading.file import grade_file
    from grpo_math.grading.house import House

    with tqdm(desc="grading", unit="answer", delay=2) as bar:
        house = House(not args.no_percent_as_number, args.digits, not args.no_last_box)
        options = {"answer_format": args.format, "timeout": args.timeout, "house": house}
        graded = grade_file(args.file, progress=lambda n: bar.update(n) and None, **options)
    counts = "  ".join(f"{verdict} {count}" for verdict, count in graded["verdicts"].items() if count)
    return _answer(args, graded, f"{graded['rows']} rows: {counts}")


def _report(args: argparse.Namespace, rest: list[str]) -> int:
    from grpo_math.report import reported

    notes, answer, text = reported.answer(args)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return _answer(args, answer, text)


def _companion(args: argparse.Namespace, rest: list[str]) -> int:
    _quiet()
    answered = companions.run(args)
    return 0 if answered is None else _answer(args, *answered)


def _push(args: argparse.Namespace, rest: list[str]) -> int:
    _quiet()
    from grpo_math.report.hub import prepared, push

    if args.dry_run:
        for name in ("private", "revision"):
            if getattr(args, name):
                raise UserError(f"--{name} would be ignored by --dry_run: leave it out")
        shown = prepared(args.run_dir, **_of(args, "repo_id merge base_model"))
        lines = [f"{size:>13,} {name}" for name, size in shown["files"].items()]
        return _answer(args, shown, "\n".join([shown["card"], f"{len(lines)} files, in bytes:", *lines]))
    pushed = push(args.run_dir, private=args.private or None, **_of(args, "repo_id merge base_model revision"))
    return _answer(args, pushed, f"pushed   {len(pushed['files'])} files: {pushed['url']}")


def _plan(args: argparse.Namespace, rest: list[str]) -> int:
    from grpo_math import planner
    from grpo_math.settings.accelerate import accelerate_config
    from grpo_math.settings.recipe import read
    from grpo_math.settings.shipped import accelerate_file

    if args.table and args.simulate:
        raise ConfigError("simulate", True, "simulates one recipe", "use --config, and not --table")
    if args.table and rest:
        raise UserError(f"{rest[0]} would be ignored by --table: leave it out")
    over = read(rest).sound().stated()
    if args.table:
        rows = {model: {cell.column: cell.text for cell in planner.cells(model)} for model in planner.MODELS}
        return _answer(args, {"recipe": planner.RECIPE, "layouts": rows}, planner.table())
    for name in ("gpus", "gpu_memory", "cpu_memory", "prompt_tokens"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e6:
            remedy = "say what to plan for, as in --gpus 1 --gpu_memory 24"
            raise ConfigError(name, value, "is out of range", remedy)
    stated: dict[str, Any] = {"gpu_gb": args.gpu_memory, "cpu_gb": args.cpu_memory, **_of(args, "gpus prompt_tokens")}
    if args.simulate:
        for name in ("gpus", "cpu_memory", "accelerate_config"):
            if getattr(args, name) is not None:
                reason = "is not simulated: it is one process on one GPU, without DeepSpeed"
                raise ConfigError(name, getattr(args, name), reason, "leave it out")
        own = {"prompt_tokens": args.prompt_tokens, "gpu_gb": args.gpu_memory, "fields": rest}
        simulated = planner.simulate(args.config, **own)
        return _answer(args, simulated, planner.words(simulated), yes=simulated["fits"] is not False)
    if args.accelerate_config:
        stated["accelerate"] = planner.read_recipe(accelerate_file(args.accelerate_config))
        accelerate_config(args.accelerate_config, stated["accelerate"])
    answer = planner.plan({**planner.read_recipe(args.config), **over}, **stated)
    return _answer(args, answer, planner.picture(answer), yes=answer["fits"])


def _doctor(args: argparse.Namespace, rest: list[str]) -> int:
    if args.table:
        return _tables(args, rest)
    _quiet()
    from grpo_math.checks.doctor import answer, doctor, summary

    findings = []
    argv = ["--config", args.config, *rest]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers' own renamings
        for finding in doctor(argv, deep=args.deep, accelerate_config=args.accelerate_config):
            findings.append(finding)
            if not args.json:
                print(finding.line(), flush=True)
    found = answer(findings)
    return _answer(args, found, summary(findings), yes=found["ok"])


def _tables(args: argparse.Namespace, rest: list[str]) -> int:
    from grpo_math.checks import table

    given = rest or [f"--{name}" for name in ("deep", "accelerate_config") if getattr(args, name)]
    if given:
        raise UserError(f"{given[0]} would be ignored by --table: leave it out")
    before, during = table.before(), table.during()
    return _answer(args, {"before": before, "during": during}, "\n\n".join(map(table.markdown, (before, during))))


def _bench(args: argparse.Namespace, rest: list[str]) -> int:
    _quiet()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts the memory, is talkative
    from grpo_math.checks.bench import SHAPES, bench_update, table

    shapes = args.shapes.split(",") if args.shapes else tuple(SHAPES)
    own = _of(args, "model runs dtype lora_r seed")
    results = bench_update(shapes=shapes, gradient_checkpointing=not args.no_gradient_checkpointing, **own)
    return _answer(args, results, table(results), yes=results["same"])


def _of(args: argparse.Namespace, names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names.split()}


def _answer(args: argparse.Namespace, answer: dict[str, Any], text: str, yes: bool = True) -> int:
    print(streams.json_text(answer) if args.json else text)
    return 0 if yes else 1


def recipe(name: str) -> Path:
    """A shipped recipe, in an installed copy or in a checkout."""
    return find(f"launch/configs/{name}")


def _quiet() -> None:
    """Leave the terminal to the progress bar and to what matters."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of its own renamings
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it offers a kernel of the Hub


if __name__ == "__main__":
    sys.exit(main())
