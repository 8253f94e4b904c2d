"""`grpo-math evaluate`, as JSON and as text: one data set in full, or a table of several; for a run, the
comparison of base and trained."""

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.checks.check_services import cache_only
from grpo_math.errors import ConfigError, UserError
from grpo_math.evaluation import from_run, suite, tables
from grpo_math.evaluation.evaluation import Evaluation, read
from grpo_math.evaluation.paired import compare
from grpo_math.generation.models import adapter_base, refuse_missing_folder
from grpo_math.problems import contamination, prompts
from grpo_math.problems.datasets import SAME, load_problems
from grpo_math.problems.sources import folder_name
from grpo_math.run.files import unwritable
from grpo_math.run.resume import run_config
from grpo_math.settings.recipe import check
from grpo_math.system.gpus import use_one_gpu
from grpo_math.system.streams import Answer, say

Sides = Mapping[str, Mapping[str, Evaluation]]  # side ("" alone, or base and trained) -> data set


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    # The default of an absent word must not replace --run.
    add("run", nargs="?", default=SUPPRESS, help=SUPPRESS)
    add("--run", metavar="RUN_DIR", help="a finished run: compare its base and trained model")
    add("--checkpoint", help="of the run: best, or a folder (default: the last)")
    add("--model", help="a folder, a Hub id, or 'embedded'")
    add("--adapter", help="a folder with a LoRA adapter")
    add("--data", "--dataset", metavar="DATA", help="a name, Hub id or file, or a,b (default: the run's)")
    add("--suite", help="math: the usual benchmarks, with their protocols")
    add("--columns", help="which column is which: problem=query,answer=target")
    add("--skip_bad_rows", action="store_true", help="count and report bad rows instead of stopping")
    add("--split", default="test", help="default: test; also a part of one: train[:500]")
    add("--n", type=int, help="number of problems, drawn with --seed (default: all)")
    add("--template", help="the prompt (default: the run's, or the data set's)")
    add("--system_prompt", metavar="TEXT", help="a text or a file, in place of the template's own")
    add("--samples", type=int, help="completions per problem (default: the data set's)")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: the data set's)")
    add(
        "--max_completion_length",
        "--max_new_tokens",
        dest="max_new_tokens",
        type=int,
        metavar="N",
        help="(default: the run's, or 512)",
    )
    add("--batch_size", type=int, metavar="N", default=32, help="completions at a time (default: 32)")
    add("--seed", type=int, default=0, help="of sampling and of --n (default: 0)")
    add("--backend", default="hf", help="hf (default), vllm (starts a server) or vllm-server")
    add("--server", metavar="URL", help="the address of the vLLM server")
    add("--contamination", metavar="DATA[:SPLIT]", help="count the problems that this training set also has")
    add("--output", help="a .json file or folder (default: evaluations)")
    add("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="compare two results files; other options are ignored")


def run(args: Namespace) -> Answer | int:
    """Answer `grpo-math evaluate`: evaluate a model or a run, or compare two results."""
    if args.compare:
        comparison = compare(*map(read, args.compare))
        return Answer(comparison.to_dict(), tables.comparison_table(comparison))
    if args.model:
        refuse_missing_folder("model", args.model)
        # An adapter's folder names its base.
        if base := adapter_base(args.model):
            if args.adapter:
                remedy = "leave out --adapter, or name its base"
                raise ConfigError("model", args.model, "is an adapter itself", remedy)
            args.adapter = args.model
            args.model = base
    for name in ("model", "adapter") if args.run else ("checkpoint",):
        if getattr(args, name) is not None:
            raise UserError(f"--{name} would be ignored {'by' if args.run else 'without'} --run: leave it out")
    if args.model is None and not args.run:
        raise UserError("--model is missing: give a model and data, or two results files with --compare")
    if args.n is not None and args.n < 1:
        raise ConfigError("n", args.n, "is not a number of problems", "give 1 or more, or leave it out for all")
    try:
        sides = evaluations(args)
    except KeyboardInterrupt:
        print("interrupted: the same command resumes it", file=sys.stderr)
        # The exit code of a shell for a program that SIGINT ended: 128 + 2.
        return 130
    content, text = answer(sides)
    return Answer(content, text)


class Requested(NamedTuple):
    """The options, read: the models, and each data set with its problems, samples, temperature and overlap with a
    training set."""

    run: from_run.RunModels
    split: str
    problems: dict[str, tuple[Sequence[Any], int, float, Any]]


def requested(args: Namespace) -> Requested:
    """Read the options, and load all sets: a wrong name of the last set would otherwise be found hours later."""
    has_own = args.run and args.data is None and args.suite is None
    names = [] if has_own else suite.sets(args.data, args.suite)
    config = (run_config(Path(args.run)) or {}) if args.run else {"model_name_or_path": args.model}
    data = [config.get("eval_dataset") or config.get("dataset")] if has_own else names
    if note := cache_only(data, config.get("model_name_or_path")):
        say("hub", note)
    if args.run:
        run = from_run.read(args.run, args.output, args.checkpoint)
    else:
        run = from_run.RunModels({"": (args.model, args.adapter)}, Path(args.output or "evaluations"))
    if reason := unwritable(run.folder.parent if run.folder.suffix == ".json" else run.folder):
        raise ConfigError("output", str(run.folder), reason, "name another one with --output")
    for name, is_for_one in (("output", str(args.output).endswith(".json")), ("columns", args.columns)):
        if is_for_one and len(names) != 1:
            reason = f"is for one data set, and there are {len(names)}" if names else "is for --data"
            raise ConfigError(name, getattr(args, name), reason, "name only that data set")
    if args.template or args.system_prompt is not None:
        # The system prompt is a part of the run's template.
        system = check("system_prompt", args.system_prompt)
        default = run.template.name if run.template else prompts.PROBLEM
        template = prompts.as_template(args.template or default, system)
        run = run._replace(
            template=template, request=replace(run.request, template=template.name, system_prompt=system)
        )
    if has_own and run.template:
        held_out = from_run.own_set(args.run, run.template, args.n)
        overlap = contamination.against(held_out.rows, args.contamination) if args.contamination else None
        of_set = held_out.rows, args.samples or 1, args.temperature or 0.0, overlap
        return Requested(run, held_out.split, {held_out.data: of_set})
    problems = {name: _problems(args, name, run) for name in names}
    return Requested(run, args.split, problems)


def evaluations(args: Namespace) -> dict[str, dict[str, Evaluation]]:
    """Evaluate what the options ask for. Return the evaluations of each side by data set.

    Bad input is reported before torch is imported.
    """
    run, split, problems = requested(args)
    for name, (rows, samples, temperature, _) in problems.items() if args.run and not args.checkpoint else ():
        if files := from_run.earlier_results(args.run, rows, samples, temperature):
            say("note", f"training has evaluated these problems of {name} already: {' and '.join(map(str, files))}")
    longest = run.request.max_new_tokens if args.max_new_tokens is None else args.max_new_tokens
    if args.backend == "hf":
        use_one_gpu()
    from grpo_math.evaluation.engines import Backend, Model
    from grpo_math.evaluation.evaluator import evaluate_engine

    backend = Backend(args.backend, args.server)
    sides: dict[str, dict[str, Evaluation]] = {side: {} for side in run.models}
    for side, (model, adapter) in run.models.items():
        # A side's model is loaded once for all sets, and freed before the next side needs the GPU.
        with Model(model, adapter, backend, request=run.request) as engine:
            for name, (rows, samples, temperature, overlap) in problems.items():
                sampling = suite.Sampling(samples, temperature, longest, args.batch_size, args.seed)
                # The files of a run have the same names for each set, so that each set needs its own folder.
                of_set = name if split in SAME else f"{name}_{split}"
                output = run.folder.joinpath(*([folder_name(of_set), f"{side}.json"] if side else []))
                sides[side][name] = evaluate_engine(
                    engine,
                    rows,
                    sampling,
                    run.request,
                    extra_settings={"data": name, "split": split},
                    output=output,
                    grade_timeout=run.grade_timeout,
                    contamination=overlap,
                )
    return sides


def _problems(args: Namespace, name: str, run: from_run.RunModels) -> tuple[Any, ...]:
    """Return the problems of a data set, samples and temperature, and its overlap with a training set."""
    template, samples, temperature = suite.evaluation_protocol(name, run.template, args.samples, args.temperature)
    rows = load_problems(
        name,
        args.split,
        template=template,
        limit=args.n,
        seed=args.seed,
        columns=args.columns or from_run.recipe_columns(run, name),
        skip_bad_rows=args.skip_bad_rows,
    )
    if args.run and (n := from_run.trained_on(args.run, rows)):
        message = f"{n} of the {len(rows)} problems of {name} are training problems of {args.run}"
        print(f"warning: {message}: give --data or --split of other problems", file=sys.stderr)
    overlap = contamination.against(rows, args.contamination) if args.contamination else None
    return rows, samples, temperature, overlap


def answer(sides: Sides) -> tuple[dict[str, Any], str]:
    """Return the JSON object and the text. The tables of a run are those of the comparison."""
    first = next(iter(sides.values()))
    shown = {
        side: _first({name: one.to_dict(records=False) for name, one in of_side.items()})
        for side, of_side in sides.items()
    }
    overlaps = {name: one.contamination for name, one in first.items() if one.contamination}
    lines = [f"{name}: {contamination.overlap_line(overlap)}" for name, overlap in overlaps.items()]
    lines += [f"results   {one.path}" for of_side in sides.values() for one in of_side.values()]
    several = len(first) > 1
    if "base" not in sides:
        table = tables.sets_table(first) if several else tables.metrics_table(_first(first))
        return {"sets": shown[""]} if several else shown[""], "\n".join([table, *lines])
    trained = sides["trained"]
    compared = {name: compare(base, trained[name]) for name, base in first.items()}
    if several:
        table = tables.comparisons_table(compared)
    else:
        (one,) = compared.values()
        table = tables.comparison_table(one)
        lines = [*(f"skill or form: {sentence}" for sentence in tables.skill_or_form(one)), *lines]
    comparison = _first({name: one.to_dict() for name, one in compared.items()})
    return {**shown, "comparison": comparison}, "\n".join([table, *lines])


def _first(values: Mapping[str, Any]) -> Any:
    """Return the only value, or all of them by name."""
    return next(iter(values.values())) if len(values) == 1 else values
