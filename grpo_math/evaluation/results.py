"""A model or adapter on a problem set -> results: accuracy with its interval, categories, and every completion.

``accuracy`` counts a right answer in whatever form, as training does; how often it was also in the format that the
prompt asked for stands beside it as ``accuracy_in_format``. Each batch is graded as it comes and its answers are kept,
so that what was cut goes on. The results carry hashes of prompt and problems (fingerprint.py) and the grader's version
(grading/version.py), so that what differs in them is not compared.

Does not compute the figures over the records (figures.py) nor compare two results (compare.py).
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo_math.errors import ConfigError
from grpo_math.evaluation import backends, journal
from grpo_math.evaluation.backends import Sampling
from grpo_math.evaluation.figures import CALLS, PARTS, Record, Results, category, summary
from grpo_math.evaluation.fingerprint import problems_hash, prompt_hash, weights_hash
from grpo_math.evaluation.scoring import TOLERANCE, as_published
from grpo_math.evaluation.toolbox import Conversation, Toolbox, conversing, toolbox
from grpo_math.generation.completions import Completion, Generate, batch_seed, batches, complete, token_ids
from grpo_math.generation.models import check_weights, load_tokenizer, model_path
from grpo_math.grading import Grade, grade_batch, version
from grpo_math.problems.prompts import refuse_without_call
from grpo_math.run.files import refuse_unwritable, write_json
from grpo_math.run.machine import versions
from grpo_math.run.metrics import CATEGORIES, RIGHT
from grpo_math.tools.walls import refuse_without

SCHEMA = 1
VERSIONS = ("torch", "transformers", "trl", "peft", "math-verify", "vllm")
Row = dict[str, Any]


def answered(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    sampling: Sampling,
    grade_timeout: float,
    tools: Toolbox | None = None,
) -> tuple[list[Completion], list[Grade]]:
    """The completions of each row, row after row, and their grades."""
    settings: dict[str, Any] = asdict(sampling)
    if tools is not None:
        talk, limits = tools.talk(tokenizer), (sampling.max_new_tokens, backends.context_of(model))
        settings |= {"talk": talk, "through": lambda generate: conversing(generate, talk, *limits)}
    samples = settings.pop("samples")
    repeated = [row for row in rows for _ in range(samples)]
    completions = complete(model, tokenizer, [row["prompt"] for row in repeated], **settings)
    return completions, _grades(repeated, completions, grade_timeout)


def evaluate(
    model: Any,
    rows: Sequence[Row],
    *,
    tokenizer: Any = None,
    adapter: str | None = None,
    samples: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int = 512,
    batch_size: int = 32,
    seed: int = 0,
    grade_timeout: float = 5.0,
    backend: str = "hf",
    server: str | None = None,
    progress: bool = True,
    output: str | Path | None = None,
    about: dict[str, Any] | None = None,
    contamination: dict[str, Any] | None = None,
    tools: Toolbox | Sequence[str] = (),
    python: dict[str, Any] | None = None,
    max_tool_calling_iterations: int | None = None,
) -> Results:
    """Results of ``model`` (a name, or a loaded model with its ``tokenizer``) on rows of `load_problems`.

    ``samples`` completions of each problem are drawn at ``temperature``; 0 is greedy and takes one sample.
    ``accuracy`` is the share of right answers in whatever form, and ``ci95`` its `wilson_of_means`;
    ``accuracy_in_format`` is the share that is right and in the format.

    ``output`` names the results file; a name that does not end in .json is a folder, in which the settings name the
    file. Answers are kept beside it as they come (`answers_file`): the same call goes on where it was cut, with the
    completions of a call that was not, and one with other settings or other weights is a `ConfigError`. A model that
    is given loaded has no name to recognise it by, and starts anew. (A verdict of ``timeout`` is the machine's: on
    one that is busy an answer may run into ``grade_timeout`` that otherwise does not. It counts as ungradable.)

    ``backend``: hf (transformers, here), vllm-server (the vLLM server at ``server``) or vllm (in this process).
    ``about`` adds facts to the results that the call must have in common with the one that it goes on with, and
    ``contamination`` what `contamination.overlap` has found. ``tools``, ``python`` and
    ``max_tool_calling_iterations`` are a recipe's: what the model may call, as in training. Long because these 20
    settings and their meaning are.
    """
    sampling = Sampling(samples, temperature, max_new_tokens, batch_size, seed)
    _refuse(rows, sampling)
    box = tools if isinstance(tools, Toolbox) else toolbox(tools, python, max_tool_calling_iterations)
    if box and box.limits and box is not tools:  # a run has tried its own before it loaded weights
        refuse_without(box.limits)
    refuse_without_call(str(rows[0].get("answer_format")), box.stated["names"] if box else ())
    started = time.perf_counter()
    named = isinstance(model, str)
    if named:
        tokenizer = _tokenizer(model, adapter, rows[0]["prompt"], backend, server, output, box)
    talk = box.talk(tokenizer) if box else None
    settings = {**(about or {}), **_settings_of(model, adapter, backend, rows, sampling, tokenizer)}
    if box:
        settings["tools"] = box.stated
    answers, records = None, {}
    if named and output is not None:
        settings["weights_hash"] = weights_hash(model_path(model), adapter)
        output = Path(output) if Path(output).suffix == ".json" else _file_in(Path(output), settings)
        answers = answers_file(output)
        records = _known(output, settings, rows, samples)

    def opened(longest: int) -> Generate:
        backends.check_context(model, longest)
        generate = backends.opened(model, adapter, tokenizer, backend, server, sampling)
        return conversing(generate, talk, max_new_tokens, backends.context_of(model)) if talk else generate

    ids = token_ids(tokenizer, [row["prompt"] for row in rows], talk)
    for batch in _answers(rows, ids, sampling, opened, grade_timeout, records, progress):
        if answers is not None:
            journal.append(answers, batch)
        records.update((_key(record), record) for record in batch)
    ordered = [records[str(row["id"]), sample] for row in rows for sample in range(samples)]
    installed = versions()
    results = {
        "schema": SCHEMA,
        **settings,
        **summary(ordered, samples),
        **({"contamination": contamination} if contamination is not None else {}),
        "seconds": round(time.perf_counter() - started, 2),
        "versions": {name: installed[name] for name in VERSIONS if name in installed},
        "prompt_of_first_row": rows[0]["prompt"],
        "rows": ordered,
    }
    if output is not None:
        write_json(output, results)
        results["results"] = str(output)
    return results


def _refuse(rows: Sequence[Row], sampling: Sampling) -> None:
    """What cannot be evaluated, before anything is loaded."""
    samples, heat = sampling.samples, sampling.temperature
    twice = len({str(row["id"]) for row in rows}) < len(rows)
    drawn, more = f"cannot be drawn at temperature {heat:g}", "give 1 or more"
    for name, value, wrong, reason, remedy in (
        ("rows", len(rows), not rows, "leaves nothing to evaluate on", "give at least one problem"),
        ("samples", samples, samples < 1, "evaluates nothing", more),
        ("samples", samples, samples > 1 and heat == 0, drawn, "give 1, or a temperature above 0"),
        ("batch_size", sampling.batch_size, sampling.batch_size < 1, "evaluates nothing", more),
        ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens < 1, "evaluates nothing", more),
        ("rows", len(rows), twice, "share an id", "give each problem an id of its own"),
        ("temperature", heat, heat < 0, "is negative", "0 is greedy, above 0 samples"),
        ("temperature", heat, not math.isfinite(heat), "is not finite", "0 is greedy, above 0 samples"),
    ):
        if wrong:
            raise ConfigError(name, value, reason, remedy)


def _tokenizer(
    model: str,
    adapter: str | None,
    prompt: Any,
    backend: str,
    server: str | None,
    output: str | Path | None,
    tools: Toolbox | None = None,
) -> Any:
    """The model's, once all is checked that can be checked before weights are loaded."""
    backends.check(backend, server, adapter)
    if output is not None:
        folder = Path(output).parent if Path(output).suffix == ".json" else Path(output)
        refuse_unwritable("output", str(output), folder, "name another file or folder")
    tokenizer = backends.loaded(model, load_tokenizer)
    if tools:
        tools.talk(tokenizer)
    if not isinstance(prompt, str):
        backends.check_chat(model, tokenizer, prompt)
    if backend == "hf":
        backends.loaded(model, check_weights)
    return tokenizer


def _settings_of(
    model: Any, adapter: str | None, backend: str, rows: Sequence[Row], sampling: Sampling, tokenizer: Any
) -> dict[str, Any]:
    """What the results state, and what a call must have in common with the one that it goes on with."""
    return {
        "model": model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "in memory",
        "adapter": adapter,
        "backend": backend,
        "template": rows[0].get("answer_format"),
        **asdict(sampling),
        "prompt_hash": prompt_hash(rows, tokenizer),
        "problems_hash": problems_hash(rows),
        version.KEY: version.version(),
    }


def answers_file(output: str | Path) -> Path:
    """Where the answers of a results file are kept as they come: one line a completion.

    >>> answers_file("runs/base.json").as_posix()
    'runs/base.answers.jsonl'
    """
    return Path(output).with_suffix(".answers.jsonl")


def _answers(
    rows: Sequence[Row],
    prompts: Sequence[list[int]],
    sampling: Sampling,
    opened: Callable[[int], Generate],
    grade_timeout: float,
    known: dict[tuple[str, int], Record],
    progress: bool,
) -> Iterator[list[Record]]:
    """The graded records of each batch that is not ``known`` in whole, with a bar of problems and accuracy so far.

    A batch of which a part is missing is generated again in whole: by its seed it gives the same answers again.
    """
    samples = sampling.samples
    jobs = [(row, sample) for row in rows for sample in range(samples)]
    keys = [(str(row["id"]), sample) for row, sample in jobs]
    ids = [ids for ids in prompts for _ in range(samples)]
    every = batches(ids, sampling.batch_size)
    missing = [number for number, batch in enumerate(every) if any(keys[i] not in known for i in batch)]
    if not missing:
        return
    generate = opened(max(map(len, ids)))
    kept = (batch for number, batch in enumerate(every) if number not in missing)
    right = [known[keys[i]]["category"] in RIGHT for batch in kept for i in batch]
    with tqdm(
        total=len(rows), initial=len(right) // samples, desc="evaluating", unit="problem", disable=not progress
    ) as bar:
        for number in missing:
            batch = every[number]
            completions = generate([ids[i] for i in batch], batch_seed(sampling.seed, number))
            grades = _grades([jobs[i][0] for i in batch], completions, grade_timeout)
            records = [_record(*jobs[i], c, grade) for i, c, grade in zip(batch, completions, grades, strict=True)]
            yield records
            right += [record["category"] in RIGHT for record in records]
            bar.set_postfix_str(f"accuracy {sum(right) / len(right):.1%}", refresh=False)
            bar.update(len(right) // samples - bar.n)


def _grades(rows: Sequence[Row], completions: Sequence[Completion], timeout: float) -> list[Grade]:
    grades = grade_batch(
        [row["answer"] for row in rows],
        [completion.text for completion in completions],
        answer_format=[row.get("answer_format") for row in rows],
        timeout=timeout,
    )
    return [as_published(grade, row["answer"], row) for grade, row in zip(grades, rows, strict=True)]


def _known(output: Path, settings: dict[str, Any], rows: Sequence[Row], samples: int) -> dict[tuple[str, int], Record]:
    """The records that an earlier call has left."""
    path = answers_file(output)
    if output.exists() and not path.exists():
        raise ConfigError("output", str(output), "holds results without their answers", "name another file")
    lines = journal.go_on(path, settings, "output")
    wanted = {(str(row["id"]), sample) for row in rows for sample in range(samples)}
    try:
        known = {_key(line): line for line in lines}
        if not known.keys() <= wanted or not all(line["category"] in CATEGORIES for line in lines):
            raise ValueError("a line of something else")
    except (KeyError, TypeError, ValueError):
        raise journal.not_one(path, "output") from None
    return known


def _key(record: Record) -> tuple[str, int]:
    return str(record["id"]), record["sample"]


def _file_in(folder: Path, settings: dict[str, Any]) -> Path:
    """Of model, adapter and data, for the reader, and of all settings, so that no two ways of evaluating share it.

    Or the file of the same settings whose name holds a hash of the grader's source, from before it had a version.
    """
    words = [settings["model"], settings["adapter"], settings.get("data")]
    digest = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    name = "-".join(Path(word).stem.replace(":", "_") for word in words if word)
    own = folder / f"{name}-{digest}.json"
    for kept in [] if answers_file(own).exists() else sorted(folder.glob(f"{escape(name)}-????????.answers.jsonl")):
        if journal.about(kept) == settings:
            return folder / kept.name.replace(".answers.jsonl", ".json")
    return own


def _record(row: Row, sample: int, completion: Completion, grade: Grade) -> Record:
    return {
        "id": row["id"],
        "sample": sample,
        "problem": row["problem"],
        "gold": row["answer"],
        **{name: row[name] for name in (*PARTS, TOLERANCE) if name in row},
        "completion": completion.text,
        "verdict": str(grade.verdict),
        "answer": grade.answer,
        "in_format": grade.in_format,
        "category": category(grade, completion.truncated),
        "tokens": completion.tokens,
        "truncated": completion.truncated,
        **_of_calls(completion),
    }


def _of_calls(completion: Completion) -> Record:
    """The turns of a completion with tools, and what became of its calls."""
    if not isinstance(completion, Conversation):
        return {}
    return {"turns": list(completion.messages), **{name: getattr(completion, name) for name in CALLS}}
