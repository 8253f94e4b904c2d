"""What `grpo-math evaluate` answers, as JSON and as text: one data set in full, or a table of several; of a run, base
and trained compared.

Does not generate, grade or compare: evaluation/ does.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.evaluation import compare, of_run, suite
from grpo_math.evaluation.figures import Results, text_of
from grpo_math.problems import contamination, prompts
from grpo_math.problems.datasets import load_problems
from grpo_math.report import terminal
from grpo_math.settings.recipe import check

Sides = Mapping[str, Mapping[str, Results]]  # side ("" alone, or base and trained) -> data set -> its results


def results(asked: Namespace) -> dict[str, dict[str, Results]]:
    """What the options of the command ask for. What cannot be read is refused before torch is imported."""
    names = suite.sets(asked.data, asked.suite)
    run = of_run.read(asked.run, asked.output) if asked.run else None
    for name, given in (("output", str(asked.output).endswith(".json")), ("columns", asked.columns)):
        if given and len(names) > 1:
            reason = f"is for one data set, and there are {len(names)}"
            raise ConfigError(name, getattr(asked, name), reason, "ask for that one alone")
    problems = {name: _problems(asked, name, run) for name in names}  # of all, before the first is evaluated
    from grpo_math.evaluation.backends import keeping
    from grpo_math.evaluation.results import evaluate

    models = run.models() if run else {"": (asked.model, asked.adapter, asked.output or "evaluations")}
    every: dict[str, dict[str, Results]] = {side: {} for side in models}
    options = {name: getattr(asked, name) for name in ("batch_size", "seed", "backend", "server")}
    with keeping():
        for side, (model, adapter, output) in models.items():
            for name in names:
                file = Path(output)
                if run and len(names) > 1:
                    file = file.parent / suite.folder_of(name) / file.name
                own = {**problems[name], "adapter": adapter, "output": str(file)}
                every[side][name] = evaluate(model, **own, **options)
    return every


def _problems(asked: Namespace, name: str, run: of_run.OfRun | None) -> dict[str, Any]:
    """A data set's problems as ``rows``, and how it is evaluated."""
    if asked.split != asked.parser.get_default("split") and name.endswith((".jsonl", ".json")):
        raise ConfigError("split", asked.split, "would be ignored: a file is taken whole", "leave it out")
    longest = (run.max_new_tokens if run else 512) if asked.max_new_tokens is None else asked.max_new_tokens
    template = asked.template or (run.template if run else None)
    how = suite.asked(name, template, asked.samples, asked.temperature)
    only = {"limit": asked.n, "seed": asked.seed, "columns": asked.columns, "skip_bad_rows": asked.skip_bad_rows}
    rows = load_problems(name, asked.split, template=how.template, **only)
    found = contamination.against(rows, asked.contamination) if asked.contamination else None
    about = {"data": name, "split": asked.split}
    tools = dict(run.tools) if run else {}
    if asked.tools is not None:
        tools = {**tools, "tools": [one for one in asked.tools.split(",") if one]}
    if asked.python is not None:
        tools["python"] = check("python", asked.python)
    if tools.get("python") and "python" not in tools.get("tools", ()):
        raise ConfigError("python", asked.python, "would be ignored without the tool python", "add --tools python")
    prompts.refuse_without_call(how.template, tools.get("tools", ()))
    drawn = {"samples": how.samples, "temperature": how.temperature, "max_new_tokens": longest}
    return {"rows": rows, **drawn, "about": about, "contamination": found, **tools}


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
