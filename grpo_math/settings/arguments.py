"""The settings of a run that TRL does not have: data, template, rewards, evaluation.

trainer/config.py has the trainer's own settings, and rules.py checks combinations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_math.problems import prompts
from grpo_math.settings.recipe_field import setting


@dataclass
class TrainArguments:
    dataset: str = setting(
        "generated",
        "The problems to train on: a known set (gsm8k, math, ...), owner/name[:config][@revision] on the Hub, a "
        "folder, a file, or generated:LEVEL,LEVEL (sums, differences, products, long_products).",
    )
    columns: str | None = setting(
        None,
        "The columns of dataset by their meaning, if their names are not the usual ones: "
        "problem=query,answer=meta.gold (also id, level and subject).",
    )
    dataset_split: str = setting("train", "The split to train on, or a part of it: train[200:].")
    dataset_limit: int | None = setting(None, "Train on at most this many problems, drawn by the seed.", ge=1)
    skip_bad_rows: bool = setting(False, "Count and report bad rows instead of stopping.")
    prompt_template: str | None = setting(
        None,
        "The prompt: gsm8k, direct, boxed, r1_zero, xml, think or python; a text with {problem}; your own as "
        "module:function; or as_is, the column prompt unchanged. Default: gsm8k, or {problem} alone with a "
        "system_prompt.",
    )
    system_prompt: str | None = setting(None, "A text or a file that replaces the template's system message.")
    answer_format: str | None = setting(
        None,
        "The form in which the prompt asks for the answer, by the name of its template. Default: the template's, "
        "or the form whose tags the prompt shows, or boxed.",
    )
    rewards: list[str] = setting(
        ["accuracy"], "Reward functions: keys of grpo_math.REWARDS, or module:function for your own."
    )
    tools: list[str] = setting(
        [],
        "Functions that the model may call: python, which runs a program in a sandbox, or your own as module:function.",
    )
    python: dict | None = setting(
        None,
        "Limits of each call of the tool python as a mapping: cpu_seconds, wall_seconds, memory_mb and output_chars.",
    )
    eval_dataset: str | None = setting(None, "The held-out problems; default: those of dataset.")
    eval_columns: str | None = setting(None, "As columns, for eval_dataset.")
    eval_split: str = setting("test", "The split to evaluate on.")
    eval_n: int | None = setting(
        None,
        "Problems that are evaluated before and after training. 0: none. Default: 128, or fewer if fewer are "
        "held out; 0 if no process contains the whole model and vLLM is off.",
        ge=0,
    )
    heldout_every: int = setting(
        0, "Evaluate every this many steps during training: short for eval_strategy: steps and eval_steps.", ge=0
    )
    heldout: list[dict] = setting(
        [],
        "The sets that are evaluated during training, each a mapping with data, and optionally split, columns, "
        "n, samples and temperature. Default: 64 problems of eval_dataset, greedy.",
    )
    keep_best: bool = setting(
        False,
        "Save the checkpoint with the best accuracy on the first held-out set (or metric_for_best_model), and "
        "name it in best.json.",
    )
    stop_at: float | None = setting(
        None,
        "End the run when the accuracy on the first held-out set reaches this at two evaluations in a row.",
        gt=0,
        le=1,
    )
    watchdog_minutes: float = setting(
        20.0,
        "After this many minutes without a step, every rank prints its stacks. 0: off. Keep it below ddp_timeout "
        "(30 minutes).",
        ge=0,
        resume="may_change",
    )
    prompts_per_step: int = setting(
        0,
        "Prompts in one optimizer step, over all processes. per_device_train_batch_size then limits the rows of "
        "one pass. 0: TRL's own fields decide.",
        ge=0,
    )

    dry_run: bool = setting(
        False, "Do everything before the first step except the evaluation, then stop.", resume="may_change"
    )
    resume: str = setting(
        "auto",
        "If output_dir already contains a run: auto continues it if its settings are the same, force continues "
        "it with the new settings.",
        choices=("auto", "force"),
        resume="may_change",
    )

    def __post_init__(self) -> None:
        template = prompts.recipe_template(vars(self))
        # config.yaml states the template and the format that the run used, not None.
        self.prompt_template = template.name
        self.answer_format = template.answer_format
        prompts.refuse_without_call(template.name, self.tools)


def needing_whole(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that generate with the model, and so need the whole model on each process unless vLLM
    samples. Without vLLM they do not work with ZeRO-3 or FSDP.

    >>> needing_whole({"eval_n": 64, "heldout_every": 0}), needing_whole({"eval_n": 64, "use_vllm": True})
    (['eval_n'], [])
    """
    if settings.get("use_vllm"):
        return []
    names = ("eval_n", "heldout_every", "eval_strategy", "eval_on_start")
    return [name for name in names if settings.get(name) not in (None, 0, "no")]
