"""The state of a trainer in a checkpoint comes back, collaborators included."""

from __future__ import annotations

import pytest
from launching import TORCHRUN, run
from small_trainers import letters, make

from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.state import restore, state_of
from grpo_math.trainer.trainer import MathGRPOTrainer


def test_the_state_of_every_collaborator_comes_back(tiny, tokenizer, tmp_path):
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path, letters, max_steps=1)
    trainer.train()
    trainer.budget.halved_to = 60
    trainer.nonfinite.in_a_row = 2
    trainer.meter.rollout_tokens, trainer.meter.tokens_per_step = [7], 3.5
    held = state_of(trainer)
    trainer.budget.halved_to, trainer.nonfinite.in_a_row = None, 0
    trainer.meter.rollout_tokens, trainer.meter.tokens_per_step = [], 0.0
    restore(trainer, held)
    assert (trainer.budget.tokens, trainer.budget.halved_to, trainer.nonfinite.in_a_row) == (60, 60, 2)
    assert (trainer.meter.rollout_tokens, trainer.meter.tokens_per_step) == ([7], 3.5)
    restore(trainer, {**held, "rollout": [{"half": "trained on"}]})
    assert trainer._buffered_inputs == [{"half": "trained on"}]


READ = """
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from grpo_math.trainer import state

ranks, folder = PartialState(cpu=True), Path(sys.argv[1])
for there in (0, 1):  # the ranks that have left their file
    if ranks.process_index == there:
        torch.save({"rollout": there}, folder / f"state_{there}.pt")
    ranks.wait_for_everyone()
    held = state.read(folder, ranks.process_index, ranks.device)
    assert held == ({"rollout": ranks.process_index} if there else None), held
ranks.wait_for_everyone()
torch.distributed.destroy_process_group()  # a process that ends while gloo's threads run may abort
"""


@pytest.mark.full
def test_a_rank_whose_file_is_missing_keeps_the_others_from_going_on_with_theirs(tmp_path):
    program = tmp_path / "read.py"
    program.write_text(READ)
    run([*TORCHRUN, str(program), str(tmp_path)], timeout=120)
