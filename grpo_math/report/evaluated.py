"""What `grpo-math evaluate` answers, as JSON and as text: one data set in full, or a table of several; of a run, base
and trained compared.

Does not generate, grade or compare: evaluation/ does.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_math.errors import ConfigError, UserError
from grpo_math.evaluation import compare, of_run, suite
from grpo_math.evaluation.figures import Results, text_of
from grpo_math.generation.models import base_of_adapter, refuse_missing_folder
from grpo_math.problems import contamination, prompts
from grpo_math.problems.datasets import load_problems
from grpo_math.reading import is_table
from grpo_math.report import terminal
from grpo_math.run.streams import Answer
from grpo_math.settings.recipe import check

if TYPE_CHECKING:
    from grpo_math.evaluation.backends import Sampling
    from grpo_math.evaluation.results import Output
    from grpo_math.evaluation.toolbox import Toolbox

SHOWN = (  # of an evaluation's results
    *("n", "accuracy", "ci95", "accuracy_in_format", "mean@n", "pass@k", "maj@k", "categories"),
    *("calling", "by_subject", "by_level", "contamination", "seconds", "results"),
)
Sides = Mapping[str, Mapping[str, Results]]  # side ("" alone, or base and trained) -> data set -> its results


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(parser=parser)
    add = parser.add_argument
    add("--run", metavar="RUN_DIR", help="a finished run: compare its base and trained model")
    add("--model", help="a folder, a Hub id, or 'embedded'")
    add("--adapter", help="a folder with a LoRA adapter")
    data = "names (gsm8k), Hub ids (owner/name[:config][@revision]), files or folders; several: a,b,c"
    add("--data", "--dataset", metavar="DATA", help=data)
    add("--suite", help="math: the usual benchmarks, with their protocols")
    add("--columns", help="as in problem=query,answer=target")
    add("--skip_bad_rows", action="store_true", help="count and report bad rows instead of stopping")
    add("--split", default="test", help="(default: test; it may be cut: train[:500])")
    add("--n", type=int, help="how many problems, drawn by --seed (default: all)")
    add("--template", help="prompt (default: the run's, or the data set's)")
    add("--tools", help="python or module:function; several: a,b")
    add("--python", metavar="JSON", help='limits of that tool, as {"wall_seconds": 5}')
    add("--samples", type=int, help="completions of each problem (default: 1)")
    add("--temperature", type=float, metavar="T", help="(default: 0, which is greedy)")
    longest: dict[str, Any] = {"dest": "max_new_tokens", "metavar": "N", "help": "(default: the run's, or 512)"}
    add("--max_completion_length", "--max_new_tokens", type=int, **longest)
    add("--batch_size", type=int, metavar="N", default=32, help="completions at a time (default: 32)")
    add("--seed", type=int, default=0, help="of sampling and of --n (default: 0)")
    add("--backend", default="hf", help="hf (default), vllm (starts a server) or vllm-server")
    add("--server", metavar="URL", help="the address of the vLLM server")
    add("--contamination", metavar="DATA[:SPLIT]", help="count the problems that this training set has too")
    add("--output", help="a .json file, or a folder for it (default: evaluations)")
    add("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="two results files, and nothing else")


def run(args: Namespace) -> Answer | int:
    """Answer `grpo-math evaluate`: evaluate a model or a run, or compare two results."""
    if args.compare:
        return _compared(args)
    args.model, args.adapter = with_base(args.model, args.adapter)
    for name in ("model", "adapter"):
        if args.run and getattr(args, name) is not None:
            raise UserError(f"--{name} would be ignored by --run: leave it out")
    if args.model is None and not args.run:
        raise UserError("--model is missing: give a model and data, or two results files with --compare")
    try:
        every = results(args)
    except KeyboardInterrupt:
        print("interrupted: the same command resumes it", file=sys.stderr)
        return 130
    return Answer(*answer(every, SHOWN))


def _compared(args: Namespace) -> Answer:
    for name, value in vars(args).items():
        if name not in ("compare", "json", "parser") and value != args.parser.get_default(name):
            raise UserError(f"--{name} would be ignored by --compare: leave it out")
    before, after = map(compare.read_results, args.compare)
    comparison = compare.comparison(before, after)
    return Answer(comparison, terminal.text_of(before, after, comparison))


def with_base(model: str | None, adapter: str | None) -> tuple[str | None, str | None]:
    """Return model and adapter. An adapter's folder that is given as the model names its base."""
    if model:
        refuse_missing_folder("model", model)
    base = base_of_adapter(model) if model else None
    if base and adapter:
        raise ConfigError("model", model, "is an adapter itself", "leave out --adapter, or name its base")
    return (base, model) if base else (model, adapter)


def results(asked: Namespace) -> dict[str, dict[str, Results]]:
    """What the options of the command ask for. What cannot be read is refused before torch is imported."""
    names = suite.sets(asked.data, asked.suite)
    run = of_run.read(asked.run, asked.output) if asked.run else None
    for name, given in (("output", str(asked.output).endswith(".json")), ("columns", asked.columns)):
        if given and len(names) > 1:
            reason = f"is for one data set, and there are {len(names)}"
            raise ConfigError(name, getattr(asked, name), reason, "ask for that one alone")
    problems = {name: _problems(asked, name, run) for name in names}  # of all, before the first is evaluated
    from grpo_math.evaluation.backends import Backend, Model
    from grpo_math.evaluation.results import evaluate

    backend = Backend(asked.backend, asked.server)
    models = run.models() if run else {"": (asked.model, asked.adapter, asked.output or "evaluations")}
    every: dict[str, dict[str, Results]] = {side: {} for side in models}
    for side, (model, adapter, path) in models.items():
        with Model(model, adapter, backend) as opened:
            for name in names:
                file = Path(path)
                if run and len(names) > 1:
                    file = file.parent / suite.folder_of(name) / file.name
                one = problems[name]
                output = replace(one.output, path=str(file))
                every[side][name] = evaluate(opened, one.rows, one.sampling, output, tools=one.tools)
    return every


class Problems(NamedTuple):
    """The problems of a data set, and how it is evaluated."""

    rows: list[dict[str, Any]]
    sampling: "Sampling"
    output: "Output"
    tools: "Toolbox | None"


def _problems(asked: Namespace, name: str, run: of_run.OfRun | None) -> Problems:
    if asked.split != asked.parser.get_default("split") and is_table(name):
        raise ConfigError("split", asked.split, "would be ignored: a file is taken whole", "leave it out")
    longest = (run.max_new_tokens if run else 512) if asked.max_new_tokens is None else asked.max_new_tokens
    template = asked.template or (run.template if run else None)
    how = suite.asked(name, template, asked.samples, asked.temperature)
    only = {"limit": asked.n, "seed": asked.seed, "columns": asked.columns, "skip_bad_rows": asked.skip_bad_rows}
    rows = load_problems(name, asked.split, template=how.template, **only)
    found = contamination.against(rows, asked.contamination) if asked.contamination else None
    tools = dict(run.tools) if run else {}
    if asked.tools is not None:
        tools = {**tools, "tools": [one for one in asked.tools.split(",") if one]}
    if asked.python is not None:
        tools["python"] = check("python", asked.python)
    if tools.get("python") and "python" not in tools.get("tools", ()):
        raise ConfigError("python", asked.python, "would be ignored without the tool python", "add --tools python")
    prompts.refuse_without_call(str(how.template), tools.get("tools", ()))
    from grpo_math.evaluation.backends import Sampling
    from grpo_math.evaluation.results import Output
    from grpo_math.evaluation.toolbox import toolbox

    sampling = Sampling(how.samples, how.temperature, longest, asked.batch_size, asked.seed)
    output = Output(about={"data": name, "split": asked.split}, contamination=found)
    box = toolbox(tools.get("tools", ()), tools.get("python"), tools.get("max_tool_calling_iterations"))
    return Problems(rows, sampling, output, box)


def answer(every: Sides, keys: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The JSON object, with these keys of each results, and the text."""
    names = list(next(iter(every.values())))
    shown: dict[str, Any] = {}
    lines: list[str] = []
    for side, found in every.items():
        kept = {name: {key: of[key] for key in keys if key in of} for name, of in found.items()}
        shown[side] = kept[names[0]] if len(names) == 1 else kept
        lines += [*([side] if side else []), *_lines(found), *([""] if side else [])]
    if "base" not in every:
        return (shown[""] if len(names) == 1 else {"sets": shown[""]}), "\n".join(lines)
    before, after = every["base"], every["trained"]
    compared = {name: compare.comparison(before[name], after[name]) for name in names}
    if len(names) > 1:
        lines.append(suite.table_of_pairs(compared, before, after))
        return {**shown, "comparison": compared}, "\n".join(lines)
    (name,) = names
    lines.append(terminal.text_of(before[name], after[name], compared[name]))
    return {**shown, "comparison": compared[name]}, "\n".join(lines)


def _lines(results: Mapping[str, Results]) -> list[str]:
    several = len(results) > 1
    lines = [suite.table(results)] if several else []
    for name, of in results.items():
        lines += [] if several else [text_of(of)]
        if found := of.get("contamination"):
            lines.append(f"{name}: {contamination.text_of(found)}" if several else contamination.text_of(found))
        lines.append(f"results   {of['results']}")
    return lines
