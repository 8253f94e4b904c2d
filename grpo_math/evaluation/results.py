"""A model or adapter on a problem set -> results: accuracy with its interval, categories, and every completion.

``accuracy`` is the share of right answers in any form, as in training; ``accuracy_in_format`` is the share of answers
that are right and in the requested format. Each batch is graded and stored at once, so that an interrupted evaluation
continues. The results contain hashes of prompt and problems (fingerprint.py) and the grader's number (`GRADER`).
Results with different hashes or numbers are not compared.

summary.py computes the metrics of the records, and paired.py compares two results.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.evaluation.backends import Model, loaded
from grpo_math.evaluation.fingerprint import Row, problems_hash, prompt_hash, weights_hash
from grpo_math.evaluation.paired import FORMAT
from grpo_math.evaluation.suite import Sampling
from grpo_math.evaluation.summary import CALLS, PARTS, TOLERANCE, Record, Results, as_published, category, summary
from grpo_math.evaluation.toolbox import Toolbox, conversing
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import batch_seed, batches, token_ids
from grpo_math.generation.models import inference_dtype, model_path
from grpo_math.generation.request import DEFAULT_REQUEST, Request
from grpo_math.grading import GRADER, TIMEOUT, Grade, grade_batch
from grpo_math.rewards.inputs import row_format
from grpo_math.run.bar import Bar
from grpo_math.run.files import replace_text, write_json, writing
from grpo_math.run.metrics import RIGHT
from grpo_math.system.machine import versions
from grpo_math.system.reading import reading
from grpo_math.tools.sandbox import require_layers

Records = dict[tuple[str, int], Record]  # by problem and sample


@dataclass(frozen=True)
class Output:
    """The results file and its settings.

    ``path`` names the results file; a name that does not end in .json is a folder, in which the settings name the file.
    ``extra`` adds settings to the results, and ``contamination`` adds the result of `contamination.overlap`.
    """

    path: str | Path | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    contamination: Mapping[str, Any] | None = None
    progress: bool | Bar = True  # a bar of several evaluations


def evaluate(
    model: Model,
    rows: Sequence[Row],
    sampling: Sampling,
    output: Output,
    request: Request = DEFAULT_REQUEST,
    *,
    tools: Toolbox | None = None,
    grade_timeout: float | None = None,
    grades: Callable[..., list[Grade]] | None = None,
) -> Results:
    """Return the results of ``model`` on rows of `load_problems`.

    Answers are stored next to the results file after each batch (`answers_file`). The same call continues an
    interrupted evaluation and gives the same completions; other settings or other weights raise `ConfigError`. The
    evaluation of a model in memory starts again, because the model has no name to compare. ``grade_timeout`` None: the
    grader's own. ``grades`` replaces the grader.
    """
    request = replace(request, temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens)
    _check(model, rows, tools, request)
    started = time.perf_counter()
    settings = {
        **output.extra,
        "model": model.name,
        "adapter": model.adapter,
        "backend": model.backend.name.removesuffix("-server"),  # the same engine if the user started the server
        "answer_format": row_format(rows[0]),
        **asdict(sampling),
        "request": request.to_dict(),
        "prompt_hash": prompt_hash(rows, model.tokenizer),
        "problems_hash": problems_hash(rows),
        "grader": GRADER,
        **({"tools": tools.settings} if tools else {}),
    }
    if model.named and output.path is not None:
        settings["weights_hash"] = weights_hash(model_path(model.name), model.adapter)
        if model.backend.name == "hf":
            settings["request"]["dtype"] = loaded(model.name, inference_dtype)
    file = None if output.path is None else _file(Path(output.path), settings)
    # A model in memory has no name or file to compare, so its stored answers may be of other weights.
    journal_file = answers_file(file) if file and model.named else None
    if journal_file and file and file.exists() and not journal_file.exists():
        raise ConfigError("output", str(file), "contains results without their answers", "give another --output")
    known = {_key(record): record for record in stored(journal_file, settings)} if journal_file else {}
    graded = partial(grades or _grades, timeout=grade_timeout)
    records = _answer(model, rows, sampling, request, known, journal_file, tools, graded, output.progress)
    results = {
        "format": FORMAT,
        **settings,
        **summary(records, sampling.samples),
        **({} if output.contamination is None else {"contamination": output.contamination}),
        "seconds": round(time.perf_counter() - started, 2),
        "versions": versions(),
        "prompt_of_first_row": rows[0]["prompt"],
        "rows": records,
    }
    if file is not None:
        write_json(file, results)
        results["results"] = str(file)
    return results


def _answer(
    model: Model,
    rows: Sequence[Row],
    sampling: Sampling,
    request: Request,
    known: Records,
    journal_file: Path | None,
    tools: Toolbox | None,
    graded: Callable[..., list[Grade]],
    progress: bool | Bar,
) -> list[Record]:
    """Return the graded records, row by row. The records of each new batch are added to ``journal_file``.

    A batch is generated unless all its records are ``known``. The same seed gives the same answers again.
    """
    samples, template_kwargs = sampling.samples, request.template_kwargs
    conversation = tools.conversation(model.tokenizer, template_kwargs) if tools else None
    jobs = [(row, sample) for row in rows for sample in range(samples)]
    keys = [(str(row["id"]), sample) for row, sample in jobs]
    prompts = token_ids(model.tokenizer, [row["prompt"] for row in rows], conversation, template_kwargs)
    ids = [prompt for prompt in prompts for _ in range(samples)]
    # Numbered before the known batches are left out: the number gives the seed, also when the evaluation continues.
    numbered = enumerate(batches(ids, sampling.batch_size))
    # A batch is sampled with one seed, so that a batch with one missing record is generated whole.
    missing = [(number, batch) for number, batch in numbered if any(keys[i] not in known for i in batch)]
    shared = progress if isinstance(progress, Bar) else None
    start = 0 if shared is None else shared.n
    if not missing:
        if shared is not None:
            shared.update(len(rows))
        return [known[key] for key in keys]
    records = dict(known)
    model.check_context(max(map(len, ids)))
    generate = model.generator(request)
    if conversation:
        generate = conversing(generate, conversation, sampling.max_new_tokens, model.context)
    bar_options: dict[str, Any] = {"initial": len(records) // samples, "desc": "evaluating", "unit": "problem"}
    with Bar(total=len(rows), disable=not progress, **bar_options) if shared is None else nullcontext(shared) as bar:
        for number, batch in missing:
            completions = generate([ids[i] for i in batch], batch_seed(sampling.seed, number))
            grades = graded([jobs[i][0] for i in batch], completions)
            new = [_record(*jobs[i], c, grade) for i, c, grade in zip(batch, completions, grades, strict=True)]
            if journal_file is not None:
                store(journal_file, new)
            records.update((_key(record), record) for record in new)
            right = sum(record["category"] in RIGHT for record in records.values())
            if shared is None:
                bar.set_postfix_str(f"accuracy {right / len(records):.1%}", refresh=False)
            bar.update(start + len(records) // samples - bar.n)
    return [records[key] for key in keys]


def refuse_shared_ids(rows: Sequence[Row]) -> None:
    if len({str(row["id"]) for row in rows}) < len(rows):
        raise ConfigError("rows", len(rows), "share an id", "give each problem another id")


def _check(model: Model, rows: Sequence[Row], tools: Toolbox | None, request: Request) -> None:
    """Raise `ConfigError` for settings that cannot be evaluated, before weights are loaded."""
    if not rows:
        raise ConfigError("rows", 0, "leaves nothing to evaluate on", "give at least one problem")
    refuse_shared_ids(rows)
    # A model in memory has no files to check, and a training run has checked its tools.
    if not model.named:
        return
    if tools and "python" in tools.settings:
        require_layers()
    model.check(rows[0]["prompt"], request.template_kwargs)


# The file of the answers


def answers_file(output: str | Path) -> Path:
    """Return the file that stores the answers during the evaluation, so that an interrupted evaluation continues.

    The first line states the settings, and each other line is the record of one completion.

    >>> answers_file("runs/base.json").as_posix()
    'runs/base.answers.jsonl'
    """
    return Path(output).with_suffix(".answers.jsonl")


def stored(path: Path, settings: Mapping[str, Any]) -> list[Record]:
    """Return the complete records, and remove a last line that was cut off. A new file gets its first line.

    Raises `Unreadable` if the file has no such first line, and `ConfigError` if its settings are other ones, so that
    results are never mixed.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"measured": dict(settings)}, ensure_ascii=False) + "\n")
        return []
    # Bytes, because a write may have ended within a character.
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    with reading(path):
        first, *records = [json.loads(line) for line in complete.splitlines()]
        measured = {**first["measured"]}
    expected = json.loads(json.dumps(settings))  # as a file has them
    for name in expected:
        if measured.get(name) != expected[name]:
            reason = f"was measured with {name}={measured.get(name)!r}, not {expected[name]!r}"
            raise ConfigError("output", str(path), reason, "give another --output, or change the setting back")
    # Only here: a file that is refused above stays as it was.
    os.truncate(path, len(complete))
    return records


def store(path: Path, records: Iterable[Record]) -> None:
    """Add the records in one write, so that a killed process can cut only the last line."""
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


# One record


def _grades(rows: Sequence[Row], completions: Sequence[Completion], timeout: float | None) -> list[Grade]:
    grades = grade_batch(
        [row["answer"] for row in rows],
        [completion.text for completion in completions],
        answer_format=[row_format(row) for row in rows],
        timeout=timeout or TIMEOUT,
    )
    return [as_published(grade, row["answer"], row) for grade, row in zip(grades, rows, strict=True)]


def _key(record: Record) -> tuple[str, int]:
    return str(record["id"]), record["sample"]


def _file(path: Path, settings: dict[str, Any]) -> Path:
    """Return the results file. In a folder its name has model, adapter, data, and a hash of all settings, so that
    other settings get another file."""
    if path.suffix == ".json":
        return path
    words = [settings["model"], settings["adapter"], settings.get("data")]
    digest = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    name = "-".join(Path(word).name.replace(":", "_") for word in words if word)
    return path / f"{name}-{digest}.json"


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
        "tokens": completion.written,
        "truncated": completion.truncated,
        **(
            {"turns": list(completion.messages), **{name: getattr(completion, name) for name in CALLS}}
            if completion.messages
            else {}
        ),
    }
