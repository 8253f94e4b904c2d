"""What a checkpoint holds beyond transformers' own files keeps its names: a run goes on from one that is older."""

from __future__ import annotations

from small_trainers import letters, make

from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.state import go_on, state_of
from grpo_math.trainer.trainer import MathGRPOTrainer

NAMES = {  # as of the first checkpoints
    *("_step", "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_last_world_entropy"),
    *("_rollout_tokens", "_tokens_per_step", "rollout", "cut_for", "nonfinite", "budget", "reserve", "sampled"),
    *("metrics", "table"),
}


def test_the_names_stay_and_what_they_hold_comes_back(tiny, tokenizer, tmp_path):
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path, letters, max_steps=1)
    trainer.train()
    held = {**state_of(trainer), "budget": 60, "nonfinite": 2, "_rollout_tokens": [7], "_tokens_per_step": 3.5}
    assert set(held) == NAMES
    go_on(trainer, held)
    assert state_of(trainer) == held
    assert (trainer.budget.tokens, trainer._nonfinite.in_a_row) == (60, 2)
    assert (trainer.meter.rollout_tokens, trainer.meter.tokens_per_step) == ([7], 3.5)
