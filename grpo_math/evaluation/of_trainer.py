"""`evaluate` for scripts: a trainer or a model, on any rows with a prompt and a gold answer.

Does not generate or grade (results.py does), and does not import a trainer: TRL's trainer works too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.evaluation import results
from grpo_math.evaluation.backends import Backend, Model, Sampling
from grpo_math.evaluation.engine import engine_of
from grpo_math.evaluation.figures import Results, summary
from grpo_math.evaluation.fingerprint import problems_hash
from grpo_math.evaluation.results import Output
from grpo_math.evaluation.toolbox import Toolbox, toolbox, toolbox_of
from grpo_math.rewards.columns import GOLDS, gold_of, text_of
from grpo_math.run.files import write_json

Row = Mapping[str, Any]


def evaluate(
    model: Any,
    problems: Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    adapter: str | None = None,
    backend: str = "hf",
    server: str | None = None,
    output: str | Path | None = None,
    extra: Mapping[str, Any] | None = None,
    progress: bool = True,
    tools: Toolbox | Sequence[str] = (),
    grade_timeout: float | None = None,
    **sampling: Any,
) -> Results:
    """Return the results of a trainer or a model on ``problems``: a list of rows, or a `datasets.Dataset`.

    A row has a ``prompt``, and its gold answer as ``answer`` or ``solution``; `load_problems` makes such rows.
    ``sampling`` are the fields of `Sampling` (samples, temperature, max_new_tokens, batch_size, seed), by default
    greedy.

    A model is a name with an ``adapter`` (`Backend` describes ``backend`` and ``server``), or a loaded model with its
    ``tokenizer``. ``output`` and ``extra`` are those of `Output`, and ``tools`` are the names of a recipe's ``tools``.

    A trainer is evaluated with its own model, tools and ``max_completion_length``, by the program that samples in
    training (vLLM with ``use_vllm``). Each call writes OUTPUT_DIR/before.json, or, after training, after.json, which
    `grpo-math report` compares. If training has several processes, each of them calls it.

    Raises `ConfigError` for rows without a prompt or a gold answer, and for weights that are split over processes and
    cannot be sampled by vLLM.
    """
    rows = rows_of(problems)
    box = tools if isinstance(tools, Toolbox) else toolbox(tools)
    if not hasattr(model, "accelerator"):
        where = Output(output, extra or {}, progress=progress)
        with Model(model, adapter, Backend(backend, server), tokenizer) as opened:
            return results.evaluate(
                opened, rows, Sampling(**sampling), where, tools=box, grade_timeout=grade_timeout or 5.0
            )
    trainer = model
    timeout = (
        getattr(getattr(trainer, "settings", None), "grade_timeout", 5.0) if grade_timeout is None else grade_timeout
    )
    drawn = Sampling(**{"max_new_tokens": trainer.max_completion_length or 512, **sampling})
    # Without a path: every rank evaluates, and only the main process writes the file below.
    where = Output(extra=extra or {}, progress=progress)
    evaluated = over_ranks(trainer, rows, drawn, where, tools=box or toolbox_of(trainer), grade_timeout=timeout)
    name = "after.json" if trainer.state.global_step else "before.json"
    run_dir = Path(str(trainer.args.output_dir))
    if trainer.accelerator.is_main_process:
        write_json(run_dir / name, evaluated)
        for callback in trainer.callback_handler.callbacks:
            # The callback that writes the report of a script.
            if hasattr(callback, "evaluated"):
                callback.evaluated.add(name)
    return evaluated


def over_ranks(
    trainer: Any,
    rows: Sequence[Row],
    sampling: Sampling,
    output: Output,
    *,
    tools: Toolbox | None = None,
    grade_timeout: float = 5.0,
) -> Results:
    """Return the results over all ranks, on every rank, by the program that samples in training."""
    output = replace(output, progress=output.progress and trainer.accelerator.is_main_process)
    with engine_of(trainer, tools) as model:
        sampling = replace(sampling, batch_size=max(sampling.batch_size, model.at_once))
        parts = model.on_ranks(
            rows,
            lambda local_rows: results.evaluate(
                model, local_rows, sampling, output, tools=tools, grade_timeout=grade_timeout
            ),
        )
    # All processes of a tensor-parallel group return the same records, and with fewer rows than ranks several ranks
    # evaluate the first row: each counts once.
    all_ranks = {(str(record["id"]), record["sample"]): record for part in parts for record in part["rows"]}
    records = [all_ranks[str(row["id"]), sample] for row in rows for sample in range(sampling.samples)]
    # A rank has summed up and hashed its own rows only.
    totals = {**summary(records, sampling.samples), "problems_hash": problems_hash(rows)}
    return {**parts[0], **totals, "rows": records}


def rows_of(problems: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows with all columns that an evaluation reads. Adds a missing id, problem or ``answer``.

    >>> rows_of([{"prompt": [{"role": "user", "content": "1 + 1?"}], "solution": 2}])[0]["problem"]
    '1 + 1?'
    """
    rows = []
    for number, row in enumerate(problems):
        gold, prompt = gold_of(row), row.get("prompt")
        if gold is None or not prompt:
            reason = f"has no {'gold answer' if prompt else 'prompt'}; its columns: {', '.join(row)}"
            remedy = f"give each row a prompt and {GOLDS}, as load_problems does"
            raise ConfigError("problems", f"row {number}", reason, remedy)
        made = {"id": f"row/{number}", "problem": text_of(prompt, "user")}
        rows.append({**made, **{name: value for name, value in row.items() if value is not None}, "answer": gold})
    return rows
