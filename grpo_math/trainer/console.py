"""Print the progress of a recipe's run at 80 columns: a bar and the held-out sets; and some completions.

A script keeps transformers' own printing of the metrics. history.jsonl, the trackers and the report contain all metrics
and columns.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer

from grpo_math.errors import escaped
from grpo_math.rewards import completion_text
from grpo_math.run import metrics
from grpo_math.run.bar import Bar
from grpo_math.run.history import number

# Without a rate, so that 80 columns have room for a bar.
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
HELDOUT_PARTS = (metrics.ACCURACY, "n", "ci95_low", "ci95_high")
PROMPT, COMPLETION = 160, 240  # characters of a text in the table: the report has the whole text


def postfix(logs: Mapping[str, Any]) -> dict[str, str]:
    """Return the few metrics that follow a progress bar: two in a terminal, and more in a log or a notebook.

    >>> postfix({"reward": 0.5, "accuracy": 0.5, "loss": 0.125, "kl": 1.0})
    {'accuracy': '0.50', 'reward': '0.50', 'loss': '0.12'}
    """
    names = [metrics.ACCURACY, metrics.REWARD, *[metrics.LOSS, metrics.LENGTH_MEAN] * (not sys.stderr.isatty())]
    shown = {name.split("/")[-1]: number(logs.get(name)) for name in names}
    return {name: f"{value:.2f}" for name, value in shown.items() if value is not None}


def heldout_lines(logs: Mapping[str, Any]) -> list[str]:
    """Return a line for each held-out set that was evaluated.

    >>> logs = {"eval_sums_accuracy": 0.75, "eval_sums_n": 64, "eval_sums_ci95_low": 0.63, "eval_sums_ci95_high": 0.84}
    >>> heldout_lines(logs)
    ['sums: 75.0% of 64 problems are correct, 95% interval 63.0% to 84.0%']
    """
    sets = [match[1] for key in logs if (match := metrics.HELDOUT_SET.fullmatch(key))]
    found = [{key: logs.get(f"{metrics.EVAL_PREFIX}{name}_{key}") for key in HELDOUT_PARTS} for name in sets]
    return [
        f"{name}: {one['accuracy']:.1%} of {one['n']} problems are correct, "
        f"95% interval {one['ci95_low']:.1%} to {one['ci95_high']:.1%}"
        for name, one in zip(sets, found, strict=True)
        if None not in one.values()
    ]


class Printer(ProgressCallback):
    """Shows a progress bar with reward and accuracy, and a line for each held-out set that was evaluated."""

    training_bar: Any

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.current_step = state.global_step
        if state.is_world_process_zero:
            self.training_bar = Bar(
                total=state.max_steps,
                initial=state.global_step,
                desc="training",
                bar_format=BAR,
                smoothing=0,  # the time left follows the mean speed, and not that of the last steps
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if metrics.LOSS in logs:
            self.training_bar.set_postfix(postfix(logs), refresh=False)
        else:
            for line in heldout_lines(logs):
                # `print` would write into the line of the progress bar.
                tqdm.write(f"step {state.global_step}: {line}", file=sys.stderr)


def replace_printers(trainer: Trainer) -> None:
    """Replace the printing callback of transformers, which prints all metrics in one line."""
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Printer())


def end_bar(trainer: Trainer) -> None:
    """End the line of the bar. After an error transformers does not, and the error would follow on the same line."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, Printer) and callback.training_bar is not None:
            callback.training_bar.close()


def print_completions(logs: Mapping[str, Any], step: int, most: int | None) -> None:
    """Print at most ``most`` completions of TRL's table ``logs``: prompt, completion, reward, advantage, verdict."""
    from trl.trainer.utils import print_prompt_completions_sample

    if most == 0:
        return
    prompts = [completion_text(prompt, role="user") for prompt in logs["prompt"]]
    # The completions of a group follow each other: print its prompt once.
    new = [prompt if prompt != previous else "" for previous, prompt in zip(["", *prompts], prompts, strict=False)]
    completions = [completion_text(completion) for completion in logs["completion"]]
    # A reward function may have one of these names. That column then replaces ours.
    columns = {**logs["extra"], **logs["rewards"]}
    # TRL prints numbers only, so a missing reward is printed as NaN.
    rewards = [math.nan if value is None else value for value in columns.get("reward", ())]
    # With TRL's ``num_samples`` the rows would be random, and would use the run's random numbers.
    print_prompt_completions_sample(
        [_shortened(prompt, PROMPT) for prompt in new[:most]],
        [_shortened(completion, COMPLETION) for completion in completions[:most]],
        {"reward": rewards} if rewards else {},
        logs["advantages"],
        step,
        extra={"verdict": [verdict or "" for verdict in columns.get("verdict", [""] * len(prompts))]},
    )


def _shortened(text: str, most: int) -> str:
    r"""Return the beginning and the end of a text: an answer comes last.

    >>> _shortened("a long completion", 8), _shortened("\x1b[2J", 8)
    ('a lo ... tion', '\\x1b[2J')
    """
    # A model's text could clear the terminal, or move the cursor to write over other lines.
    text = escaped(text, keep="\n")
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
