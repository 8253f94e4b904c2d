"""`evaluate` as scripts call it: a trainer, or a model, on rows of any kind that hold a prompt and a gold answer.

Of a trainer the model under training answers, over all ranks, and the results are kept in its ``output_dir``:
before.json until it has trained, after.json then.

Does not generate or grade (results.py does), and imports no trainer: TRL's own will do.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from grpo_math.errors import ConfigError
from grpo_math.evaluation import results
from grpo_math.evaluation.figures import Results, summary
from grpo_math.evaluation.fingerprint import problems_hash
from grpo_math.evaluation.toolbox import toolbox_of
from grpo_math.rewards.columns import GOLDS, gold_of, text_of
from grpo_math.run.files import write_json
from grpo_math.run.weights import split_by

Row = dict[str, Any]


def evaluate(model: Any, problems: Iterable[Mapping[str, Any]], **settings: Any) -> Results:
    """Results of a trainer or of a model on ``problems``: a list of rows, or a `datasets.Dataset`.

    A row has a ``prompt``, and its gold as ``answer`` or ``solution``; `load_problems` makes such rows. ``settings``
    are those of `results.evaluate` (samples, temperature, max_new_tokens, ...). Of a trainer the lengths
    are those that it trains with and the answers are greedy, and each call writes OUTPUT_DIR/before.json, or, once it
    has trained, after.json, which `grpo-math report` compares. On several processes all of them call it.

    Raises `ConfigError` for rows without a prompt or a gold, and for weights that are split over processes.
    """
    rows = rows_of(problems)
    if not hasattr(model, "accelerator"):
        return results.evaluate(model, rows, **settings)
    trainer = model
    _refuse_split_weights(trainer)
    longest = getattr(trainer, "max_completion_length", None) or 512
    timeout = getattr(getattr(trainer, "settings", None), "grade_timeout", 5.0)
    found = over_ranks(trainer, rows, **{"max_new_tokens": longest, "grade_timeout": timeout, **settings})
    name = "after.json" if trainer.state.global_step else "before.json"
    run_dir = Path(str(trainer.args.output_dir))
    adapter = run_dir / "adapter"
    if name == "after.json":
        found["adapter"] = str(adapter) if (adapter / "adapter_config.json").exists() else None
    if trainer.accelerator.is_main_process:
        write_json(run_dir / name, found)
        for kept in (callback for callback in trainer.callback_handler.callbacks if hasattr(callback, "evaluated")):
            kept.evaluated.add(name)
    return found


def over_ranks(trainer: Any, rows: list[Row], *, progress: bool = True, **settings: Any) -> Results:
    """Results over all ranks, on each of them: each takes every n-th row."""
    accelerator = trainer.accelerator
    own = rows[accelerator.process_index :: accelerator.num_processes] or rows[:1]
    settings = {"tools": toolbox_of(trainer) or (), **settings}
    settings = {"tokenizer": trainer.processing_class, "progress": progress and accelerator.is_main_process, **settings}
    found = results.evaluate(accelerator.unwrap_model(trainer.model), own, **settings)
    if accelerator.num_processes > 1:
        samples = settings.get("samples", 1)
        of_all = {(record["id"], record["sample"]): record for record in gather_object(found["rows"])}
        found["rows"] = [of_all[str(row["id"]), sample] for row in rows for sample in range(samples)]
        found.update(summary(found["rows"], samples), problems_hash=problems_hash(rows))
    return found


def rows_of(problems: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows with all that an evaluation reads: an id, the problem's text and the gold are added where they lack.

    >>> rows_of([{"prompt": [{"role": "user", "content": "1 + 1?"}], "solution": 2}])[0]["problem"]
    '1 + 1?'
    """
    rows = []
    for number, row in enumerate(problems):
        gold, prompt = gold_of(row), row.get("prompt")
        if gold is None or not prompt:
            lacks, remedy = (f"no gold ({GOLDS})", f"a column {GOLDS}") if prompt else ("no prompt", "a column prompt")
            reason = f"is a row with {lacks}; its columns: {', '.join(row)}"
            raise ConfigError("problems", f"row {number}", reason, f"give each row {remedy}, as load_problems does")
        made = {"id": f"row/{number}", "problem": text_of(prompt, "user")}
        rows.append({**made, **{name: value for name, value in row.items() if value is not None}, "answer": gold})
    return rows


def _refuse_split_weights(trainer: Any) -> None:
    if split := split_by(trainer.accelerator):
        reason = f"has its weights split over the processes ({split}), and generation here needs all of them"
        raise ConfigError("trainer", type(trainer).__name__, reason, "evaluate the saved model with grpo-math evaluate")
