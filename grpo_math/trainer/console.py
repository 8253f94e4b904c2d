"""Print a training step at 80 columns: metrics in groups, and some completions.

history.jsonl, the trackers and the report contain all metrics and columns.
"""

import math
import re
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

COLUMNS = 80
# Without a rate, so that 80 columns have room for a bar.
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
REWARD_MEAN = re.compile(f"(?:eval_)?{metrics.reward_key('([^/]+)')}")
HELDOUT_PARTS = (metrics.ACCURACY, "n", "ci95_low", "ci95_high")
PROMPT, COMPLETION = 160, 240  # characters of a text in the table: the report has the whole text

# One line per group. Metrics that do not fit are left out, so the most important ones come first.
GROUPS: dict[str, tuple[str, ...]] = {
    # The means of the reward functions follow the first two.
    "step": (
        *(metrics.REWARD, metrics.ACCURACY, metrics.REWARD_STD, metrics.DEGENERATE, metrics.FORMAT_RATE),
        metrics.ACCURACY_IN_FORMAT,
    ),
    "completions": (metrics.LENGTH_MEAN, metrics.TRUNCATED, metrics.ENTROPY, metrics.SKIPPED),
    "update": (
        *(metrics.LOSS, metrics.GRAD_NORM, metrics.KL, metrics.CLIP_REGION, metrics.LEARNING_RATE),
        metrics.RATIO,
    ),
    "seconds": (metrics.SECONDS_STEP, metrics.SECONDS_GENERATE, metrics.SECONDS_UPDATE, metrics.TOKENS_PER_SECOND),
}


def metric_lines(logs: Mapping[str, Any]) -> list[str]:
    """Return at most four lines with the main metrics of a log entry.

    >>> log = {"step": 3, "loss": 0.01234567, "reward": 0.5, "rewards/short/mean": 0.25, "clip_ratio/low_min": 0}
    >>> for line in metric_lines(log): print(line)
    step 3       reward 0.5, short 0.25
    update       loss 0.01235
    """
    means = {one[1]: value for key, value in logs.items() if (one := REWARD_MEAN.fullmatch(key))}
    lines = []
    for group, names in GROUPS.items():
        functions = means if group == "step" else {}
        # transformers adds the prefix to the metrics of an evaluation.
        first, last = (
            {name: logs.get(name, logs.get(f"eval_{name}")) for name in part} for part in (names[:2], names[2:])
        )
        values = {**first, **functions, **last}
        texts = [f"{name.split('/')[-1]} {value:.4g}" for name, value in values.items() if number(value) is not None]
        label = f"step {logs[metrics.STEP]}" if group == "step" else group
        while len(line := f"{label:12} {', '.join(texts)}") > COLUMNS:
            texts.pop()
        lines += [line.rstrip()] if texts or group == "step" else []
    return lines


def is_step_log(logs: Mapping[str, Any]) -> bool:
    """Return True for the metrics of training steps or of an evaluation: the last log entry of a run has neither."""
    return "train_runtime" not in logs


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


class Printer(ProgressCallback, PrinterCallback):
    """Shows a progress bar. The bar of a recipe has reward and accuracy; a script also gets lines with more metrics.

    Replaces transformers' two callbacks, which print all keys in one line. It inherits from both, so that a script
    that removes either of them removes this one.
    """

    training_bar: Any

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.current_step = state.global_step
        if state.is_world_process_zero:
            self.training_bar = Bar(
                total=state.max_steps,
                initial=state.global_step,
                desc="training",
                bar_format=BAR,
                smoothing=0,  # the time left follows the mean speed, and not that of the last steps
                # A recipe silences transformers, which turns its bars off.
                disable=args.disable_tqdm and not self.trainer.grpo_math.is_recipe_run,
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if not self.trainer.grpo_math.is_recipe_run:
            if is_step_log(logs):
                # `print` would write into the line of the progress bar.
                tqdm.write("\n".join(metric_lines({metrics.STEP: state.global_step, **logs})))
        elif metrics.LOSS in logs:
            self.training_bar.set_postfix(postfix(logs), refresh=False)
        else:
            for line in heldout_lines(logs):
                tqdm.write(f"step {state.global_step}: {line}", file=sys.stderr)


def replace_printers(trainer: Trainer) -> None:
    """Replace transformers' printing callbacks by ours. A subclass comes from the user, and stays."""
    replacements: dict[type, Any] = dict.fromkeys((PrinterCallback, ProgressCallback), Printer(trainer))
    # transformers imports this module in a notebook.
    if notebook := sys.modules.get("transformers.utils.notebook"):
        from grpo_math.trainer.notebook import MetricTable

        replacements[notebook.NotebookProgressCallback] = MetricTable()
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback) in replacements:
            trainer.remove_callback(type(callback))
            trainer.add_callback(replacements[type(callback)])


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
