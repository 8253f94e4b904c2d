"""An engine answers problems, and each answer is graded: the one way in which this package evaluates.

The command, a training (before, after and in between) and `grpo_math.evaluate` call `evaluate_engine`.

``accuracy`` is the share of right answers in any form, as in training; ``accuracy_in_format`` is the share of answers
that are right and in the requested format. Each batch is graded and stored at once, so that an interrupted evaluation
continues. The settings contain hashes of prompt and problems (fingerprint.py) and the grader's number (`GRADER`).
Evaluations with different hashes or numbers are not compared.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.evaluation.engines import Model
from grpo_math.evaluation.evaluation import Evaluation, journal_file, known_records, results_file, store, write
from grpo_math.evaluation.fingerprint import Row, problems_hash, prompt_hash
from grpo_math.evaluation.suite import Sampling
from grpo_math.evaluation.summary import PARTS, Record, as_published, category, summarize
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import batch_seed, batches, token_ids, with_open_thoughts
from grpo_math.generation.request import DEFAULT_REQUEST, Request
from grpo_math.grading import GRADER, TIMEOUT, Grade, grade_batch
from grpo_math.rewards.inputs import row_format
from grpo_math.run.bar import Bar
from grpo_math.system.machine import versions


def evaluate_engine(
    engine: Model,
    problems: Sequence[Row],
    sampling: Sampling,
    request: Request = DEFAULT_REQUEST,
    *,
    extra_settings: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    grade_timeout: float | None = None,
    contamination: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Evaluation:
    """Return the evaluation of an engine on rows of `load_problems`. All ranks call this, and get all records.

    ``output`` names the results file; a name that does not end in .json is a folder, in which the settings name the
    file. Until it is complete, answers are stored next to it after each batch (`journal_file`). The same call continues
    an interrupted evaluation and gives the same completions; other settings or other weights raise `ConfigError`. The
    evaluation of a model in memory starts again, because the model has no name to compare.

    ``extra_settings`` are stored, too. ``contamination``: what `contamination.overlap` returns. ``grade_timeout`` None:
    the time limit of the grader. ``progress``: show a bar.
    """
    started = time.perf_counter()
    request = replace(request, temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens)
    sampling = replace(sampling, batch_size=max(sampling.batch_size, engine.min_batch_size))
    _check(engine, problems, request)
    settings = {**(extra_settings or {}), **_settings(engine, problems, sampling, request)}
    if engine.named and output is not None:
        settings |= engine.files_identity(request)
    file = None if output is None else results_file(Path(output), settings)
    # The stored answers of a model in memory, which has no name, may be of other weights.
    journal = journal_file(file) if file and engine.named else None
    known = known_records(file, settings) if file and engine.named else []
    job = Job(engine, sampling, request, grade_timeout, known, journal, progress)
    # Each rank has a clock. The ranks agree on the seconds of the slowest.
    parts = engine.gather_from_ranks(
        problems, lambda rows, share: (job.answer(rows, share), round(time.perf_counter() - started, 2))
    )
    # All processes of a tensor-parallel group return the same records, and with fewer rows than ranks several ranks
    # answer the first row: each counts once.
    by_key = {record.key: record for part, _ in parts for record in part}
    records = [by_key[str(row["id"]), sample] for row in problems for sample in range(sampling.samples)]
    evaluation = Evaluation(
        settings,
        summarize(records, sampling.samples),
        records,
        seconds=max(seconds for _, seconds in parts),
        versions=versions(),
        first_prompt=problems[0]["prompt"],
        contamination=contamination,
        path=str(file) if file else None,
    )
    if file:
        write(evaluation, file)
    if journal:
        journal.unlink(missing_ok=True)
    return evaluation


def _check(engine: Model, problems: Sequence[Row], request: Request) -> None:
    """Raise `ConfigError` for settings that cannot be evaluated, before weights are loaded."""
    if not problems:
        raise ConfigError("rows", 0, "leaves nothing to evaluate on", "give at least one problem")
    if len({str(row["id"]) for row in problems}) < len(problems):
        raise ConfigError("rows", len(problems), "share an id", "give each problem another id")
    # A model in memory has no files to check.
    if engine.named:
        engine.check(problems[0]["prompt"], request.template_kwargs)


def _settings(engine: Model, problems: Sequence[Row], sampling: Sampling, request: Request) -> dict[str, Any]:
    """Return who is asked what, and how, as the results file states it."""
    return {
        **engine.identity(),
        "answer_format": row_format(problems[0]),
        **asdict(sampling),
        "request": request.to_dict(),
        "prompt_hash": prompt_hash(problems, engine.tokenizer),
        "problems_hash": problems_hash(problems),
        "grader": GRADER,
    }


@dataclass(frozen=True)
class Job:
    """An evaluation on one rank: who answers, how, and where the answers are stored.

    ``known``: the records of an interrupted evaluation. ``journal``: the file that gets the records of each batch.
    """

    engine: Model
    sampling: Sampling
    request: Request
    grade_timeout: float | None
    known: Sequence[Record]
    journal: Path | None
    progress: bool

    def answer(self, rows: Sequence[Row], share: int) -> list[Record]:
        """Return the graded records of ``rows``, row by row. ``share``: the number of the rank that has these rows.

        A batch is generated unless all its records are known. The same seed gives the same answers again.
        """
        engine, samples = self.engine, self.sampling.samples
        # Batches are numbered on each rank. The first rank has the seeds of an evaluation by one process.
        first_seed = batch_seed(self.sampling.seed, -share) if share else self.sampling.seed
        records = {record.key: record for record in self.known}
        jobs = [(row, sample) for row in rows for sample in range(samples)]
        keys = [(str(row["id"]), sample) for row, sample in jobs]
        prompts = token_ids(engine.tokenizer, [row["prompt"] for row in rows], self.request.template_kwargs)
        ids = [prompt for prompt in prompts for _ in range(samples)]
        # Numbered before the known batches are left out: the number gives the seed, also when the evaluation continues.
        # A batch is sampled with one seed, so that a batch with one missing record is generated whole.
        missing = [
            (number, batch)
            for number, batch in enumerate(batches(ids, self.sampling.batch_size))
            if any(keys[i] not in records for i in batch)
        ]
        if not missing:
            return [records[key] for key in keys]

        engine.check_context(max(map(len, ids)))
        generate = engine.generator(self.request)
        hidden, done = not (self.progress and engine.shows_progress), len(records) // samples
        with Bar(total=len(rows), initial=done, desc="evaluating", unit="problem", disable=hidden) as bar:
            for number, batch in missing:
                completions = generate([ids[i] for i in batch], batch_seed(first_seed, number))
                grades = self._grade([jobs[i][0] for i in batch], completions)
                graded = zip(batch, completions, grades, strict=True)
                new = [_record(*jobs[i], completion, grade) for i, completion, grade in graded]
                if self.journal is not None:
                    store(self.journal, new)
                records.update((record.key, record) for record in new)
                right = sum(record.right for record in records.values())
                bar.set_postfix_str(f"accuracy {right / len(records):.1%}", refresh=False)
                bar.update(len(records) // samples - bar.n)
        return [records[key] for key in keys]

    def _grade(self, rows: Sequence[Row], completions: Sequence[Completion]) -> list[Grade]:
        prompts, texts = [row["prompt"] for row in rows], [completion.text for completion in completions]
        ids = [completion.tokens for completion in completions]
        grades = grade_batch(
            [row["answer"] for row in rows],
            with_open_thoughts(self.engine.tokenizer, prompts, texts, ids, **self.request.template_kwargs),
            answer_format=[row_format(row) for row in rows],
            problems=[row["problem"] for row in rows],
            timeout=self.grade_timeout or TIMEOUT,
        )
        return [
            as_published(grade, row["answer"], row.get("tolerance")) for grade, row in zip(grades, rows, strict=True)
        ]


def _record(row: Row, sample: int, completion: Completion, grade: Grade) -> Record:
    return Record(
        id=row["id"],
        sample=sample,
        problem=row["problem"],
        gold=row["answer"],
        **{name: row.get(name) for name in (*PARTS, "tolerance")},
        completion=completion.text,
        verdict=str(grade.verdict),
        answer=grade.answer,
        in_format=grade.in_format,
        category=category(grade, completion.truncated),
        tokens=len(completion.tokens),
        truncated=completion.truncated,
    )
