r"""The pass rate of each problem, measured once with the model before training, and stored in a file.

.. math:: \text{pass rate} = \frac{\text{completions graded correct}}{\text{completions that could be graded}}

The file is JSONL. The first line states the conditions (model, template, temperature, longest completion, completions
per problem), and each other line is one problem. The file is written during the measurement, so that an interrupted
measurement continues. Any data set can use the rates of its problems. problems/difficulty.py selects and orders by the
rates.

Does not measure again during training.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo_math.evaluation import journal
from grpo_math.evaluation.backends import Model, Sampling
from grpo_math.evaluation.results import answer
from grpo_math.evaluation.toolbox import Toolbox
from grpo_math.grading import Verdict
from grpo_math.problems.difficulty import Rates, key
from grpo_math.problems.problem import Problem

FIELD = "difficulty_file"


def default_file(output_dir: str | Path, conditions: Mapping[str, Any]) -> Path:
    """Return the file for these conditions, next to the run's folder, so that the next run finds the file.

    >>> conditions = {"model": "org/Small", "template": "gsm8k"}
    >>> default_file("runs/demo", conditions).as_posix()
    'runs/pass_rates/Small-f2b3cb20.jsonl'
    """
    digest = sha256(json.dumps(dict(conditions), sort_keys=True).encode()).hexdigest()[:8]
    return Path(output_dir).parent / "pass_rates" / f"{Path(str(conditions['model'])).name}-{digest}.jsonl"


def read(path: Path, conditions: Mapping[str, Any]) -> Rates:
    """Return the rates in a file that `measure` wrote; {} if the file does not exist.

    Raises `ConfigError` if the file has other conditions. A last line that was cut off is left out.
    """
    return _rates(journal.read(path, conditions, FIELD))


def measure(
    model: Model,
    rows: Sequence[Problem],
    path: Path,
    conditions: Mapping[str, Any],
    *,
    seed: int = 0,
    batch_size: int = 64,
    grade_timeout: float = 5.0,
    tools: Toolbox | None = None,
) -> Rates:
    """Return the rates of all ``rows``. Missing rates are measured, on all processes, and added to the file.

    ``conditions`` is the first line of the file: ``samples`` completions of each prompt are drawn at ``temperature``,
    with at most ``max_tokens`` tokens. Only the main process reads and writes the file. Torch's generators do not
    change, so training does not depend on whether the rates were measured or read.
    """
    from accelerate import PartialState

    from grpo_math.run.bar import Bar
    from grpo_math.run.main_process import on_main

    state = PartialState()
    rates: Rates = on_main(lambda: _rates(journal.resume(path, conditions, FIELD)))
    todo = list({key(row): row for row in rows if key(row) not in rates}.values())
    samples = conditions["samples"]
    batch_size = max(batch_size, model.at_once)
    sampling = Sampling(samples, conditions["temperature"], conditions["max_tokens"], batch_size, seed)
    share = max(1, batch_size // samples)  # problems per process at a time
    with Bar(total=len(todo), desc="pass rates", unit="problem", disable=not (todo and state.is_main_process)) as bar:
        for start in range(0, len(todo), share * state.num_processes):
            all_ranks = todo[start : start + share * state.num_processes]
            named = [{**row, "id": i} for i, row in enumerate(all_ranks)]  # ids of a training set may repeat
            first = seed + len(rates) * state.num_processes

            def answers(part: Sequence[Any], first: int = first) -> Any:
                drawn = replace(sampling, seed=first + part[0]["id"])  # another seed for each part
                return answer(model, part, drawn, tools=tools, grade_timeout=grade_timeout)

            parts = model.on_ranks(named, answers)
            by_row = {(record["id"], record["sample"]): record for part in parts for record in part}
            lines = []
            for i, row in enumerate(all_ranks):
                verdicts = [Verdict(by_row[i, sample]["verdict"]) for sample in range(samples)]
                graded = sum(not verdict.ungradable for verdict in verdicts)
                counts = {"correct": verdicts.count(Verdict.CORRECT), "graded": graded}
                lines.append({"id": row["id"], "problem": row["problem"], "answer": row["answer"], **counts})
            if state.is_main_process:
                journal.append(path, lines)
            rates.update(_rates(lines))
            bar.update(len(all_ranks))
    return rates


def _rates(lines: Sequence[Mapping[str, Any]]) -> Rates:
    return {key(line): line["correct"] / line["graded"] if line["graded"] else None for line in lines}
