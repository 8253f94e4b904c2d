"""Evaluation before, during and after training: settings and rules."""

from dataclasses import dataclass

from grpo_math.settings.declare import Facts, Rule, setting, without

FACTS: Facts = {"eval_n": {"ge": 0}, "heldout_every": {"ge": 0}}


@dataclass
class Evaluation:
    """Evaluation."""

    eval_dataset: str | None = setting(None, "The held-out problems, if they are not the split test of dataset.")
    eval_columns: str | None = setting(None, "As columns, for an eval_dataset whose columns have other names.")
    eval_split: str = setting("test", "The split to evaluate on.")
    eval_n: int | None = setting(
        None,
        "Problems that are evaluated before and after training; 0: none. Default: 128, or fewer if fewer are "
        "held out; 0 if no process contains the whole model and vLLM is off.",
    )
    heldout_every: int = setting(
        0, "Evaluate every this many steps during training: short for eval_strategy: steps and eval_steps."
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


PROGRAM_RULES = [
    Rule(
        "error",
        "load_best_model_at_end",
        lambda s: s.load_best_model_at_end and not s.evaluates,
        "needs evaluations during training",
        "set heldout_every",
    ),
    Rule(
        "error",
        "save_strategy",
        lambda s: s.save_strategy == "best" and not s.evaluates,
        "needs evaluations during training",
        "set heldout_every",
    ),
    Rule(
        "no_effect",
        "keep_best",
        lambda s: s.save_strategy == "no",
        "there are no checkpoints (save_strategy='no')",
        "set save_strategy: best, or steps",
    ),
    Rule(
        "error",
        "heldout_every",
        lambda s: s.heldout_every and s.eval_strategy != "no",
        "and eval_strategy={eval_strategy} both set when to evaluate",
        "leave one of the two out",
    ),
    Rule(
        "error",
        "eval_steps",
        lambda s: s.eval_strategy == "steps" and s.eval_steps is None,
        "is missing: transformers would evaluate at every logged step",
        "give the steps between two evaluations",
    ),
    Rule(
        "no_effect",
        "eval_steps",
        lambda s: s.heldout_every or s.eval_strategy != "steps",
        "heldout_every={heldout_every} and eval_strategy={eval_strategy} set when to evaluate",
    ),
    Rule(
        "no_effect",
        "heldout keep_best metric_for_best_model",
        lambda s: not s.evaluates,
        "nothing is evaluated during training",
        "set heldout_every",
    ),
    Rule(
        "no_effect",
        "eval_dataset",
        lambda s: s.eval_n == 0 and (s.heldout or not s.evaluates),
        "nothing is evaluated",
        "set eval_n, or heldout_every",
    ),
    without("eval_dataset", "eval_columns"),
]
