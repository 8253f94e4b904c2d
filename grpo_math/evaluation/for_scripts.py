"""`grpo_math.evaluate` for scripts: a trainer or a model, on any rows with a prompt and a gold answer.

TRL's own trainer works too.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, UserError
from grpo_math.evaluation.engines import Backend, Model, quantisation_fields
from grpo_math.evaluation.evaluation import write
from grpo_math.evaluation.evaluator import evaluate_engine
from grpo_math.evaluation.fingerprint import Row
from grpo_math.evaluation.suite import Sampling
from grpo_math.evaluation.trainer_engines import open_engine
from grpo_math.generation.request import request_from
from grpo_math.rewards.inputs import GOLDS, completion_text, read_gold_answer


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
    grade_timeout: float | None = None,
    **sampling: Any,
) -> dict[str, Any]:
    """Return the results of a trainer or a model on ``problems``: a list of rows, or a `datasets.Dataset`. If training
    has several processes, all ranks call this.

    A row has a ``prompt``, and its gold answer as ``answer`` or ``solution``; `load_problems` makes such rows.
    ``sampling`` are the fields of `Sampling` (samples, temperature, max_new_tokens, batch_size, seed), by default
    greedy.

    A model is a name with an ``adapter`` (`Backend` describes ``backend`` and ``server``), or a loaded model with its
    ``tokenizer``. ``output`` is the results file or its folder (`evaluate_engine`), ``extra`` adds settings to the
    results.

    A trainer is evaluated with its own model and ``max_completion_length``, by the program that samples in training
    (vLLM with ``use_vllm``). Each call writes OUTPUT_DIR/before.json, or, after training, after.json, which
    `grpo-math report` compares.

    Raises `ConfigError` for rows without a prompt or a gold answer, and for weights that are split over processes and
    cannot be sampled by vLLM. Raises `UserError` for a trainer whose completions have several turns.
    """
    rows = evaluation_rows(problems)
    how: dict[str, Any] = {"extra_settings": extra, "progress": progress}
    if not hasattr(model, "accelerator"):
        with Model(model, adapter, Backend(backend, server), tokenizer) as engine:
            how |= {"grade_timeout": grade_timeout, "output": output}
            return evaluate_engine(engine, rows, Sampling(**sampling), **how).to_dict()
    trainer = model
    requesters = {"tools": "tools", "environment_factory": "environment_factories", "rollout_func": "rollout_func"}
    for name, attribute in requesters.items():
        if getattr(trainer, attribute, None):
            ways = "call trainer.evaluate(data), which is TRL's loop, or evaluate the saved model"
            raise UserError(f"{name}: an evaluation would not ask as training does: {ways}")
    of_run = getattr(getattr(trainer, "grpo_math", None), "settings", None)
    how["grade_timeout"] = grade_timeout or getattr(of_run, "grade_timeout", None)
    # The trainer's arguments and weights state what training asks.
    quantisation = quantisation_fields(trainer.accelerator.unwrap_model(trainer.model))
    request = request_from({**vars(trainer.args), **quantisation})
    drawn = Sampling(**{"max_new_tokens": request.max_new_tokens, **sampling})
    with open_engine(trainer) as engine:
        evaluation = evaluate_engine(engine, rows, drawn, request, **how)
    if trainer.accelerator.is_main_process:
        file = Path(str(trainer.args.output_dir)) / ("after.json" if trainer.state.global_step else "before.json")
        # `RunFiles` of a script: the folder may contain the evaluation of an earlier run.
        for run_files in [one for one in trainer.callback_handler.callbacks if hasattr(one, "archive")]:
            run_files.archive([file])
            run_files.written.add(file)
        write(evaluation, file)
    return evaluation.to_dict()


def evaluation_rows(problems: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows with all columns that an evaluation reads. Adds a missing id, problem or ``answer``.

    >>> evaluation_rows([{"prompt": [{"role": "user", "content": "1 + 1?"}], "solution": 2}])[0]["problem"]
    '1 + 1?'
    """
    rows = []
    for number, row in enumerate(problems):
        gold, prompt = read_gold_answer(row), row.get("prompt")
        if gold is None or not prompt:
            reason = f"has no {'gold answer' if prompt else 'prompt'}; its columns: {', '.join(row)}"
            remedy = f"give each row a prompt and {GOLDS}, as load_problems does"
            raise ConfigError("problems", f"row {number}", reason, remedy)
        known = {name: value for name, value in row.items() if value is not None}
        if not isinstance(known.get("problem"), str):
            known["problem"] = completion_text(prompt, "user")
        rows.append({"id": f"row/{number}", **known, "answer": gold})
    return rows
