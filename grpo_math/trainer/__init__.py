"""Rewards -> advantages -> loss -> gradient: `MathGRPOTrainer` and its collaborators, loaded on first use.

The data flow, each stage with the method of the trainer that starts it and the file that does the work:

    rollout          prompts -> completions              _generate_single_turn             generation/
    -> verdicts      each completion graded once         _grade                            grading/
    -> rewards       (B, F), then weighted (P, G)        _calculate_rewards                rewards/
                     uniform groups are replaced         _generate_and_score_completions   resample.py
    -> advantages    (P, G)                              _set_advantages                   advantages.py
    -> micro-batches rows by prompt, and loss weights    _prepare_inputs                   micro_batches.py, arrange.py
    -> log-probs     (B, T), from packed rows            _get_per_token_logps_...          scoring.py, packing.py
    -> loss          TRL's loss, and added terms         _loss_of                          losses.py, reference.py
    -> gradient      summed over micro-batches           training_step, _get_grad_norm     budget.py, nonfinite.py
"""

from importlib import import_module
from typing import Any

_HOME = {"MathGRPOConfig": "config", "MathGRPOTrainer": "trainer"}
__all__ = ["MathGRPOConfig", "MathGRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
