"""max_seq_length_train: what is trained on is cut or left out, what is sampled and graded is not."""

from __future__ import annotations

import pytest
import torch
from small_trainers import SMALL, letters, make, relative, weights
from trl import GRPOConfig, GRPOTrainer

from grpo_math.run import metrics
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.packing import GroupLayout, layout, pack, unpack
from grpo_math.trainer.rows import join, limited, scored, shortest
from grpo_math.trainer.trainer import MathGRPOTrainer

LIMIT = 16  # prompts have 1 to 19 tokens, completions up to 12


class Plain(GRPOTrainer):
    """Stock TRL with the limit done by loops, on nothing but the mask."""

    longer = "truncate"

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"].clone()
        for row, prompt in enumerate(output["prompt_mask"].sum(dim=1).tolist()):
            room = max(0, LIMIT - prompt)
            if int(mask[row].sum()) > room:
                mask[row, 0 if self.longer == "mask" else room :] = 0
        output["completion_mask"], output["num_items_in_batch"] = mask, mask.sum()
        return output


@pytest.mark.full(keep=["[{}-mask"])
@pytest.mark.parametrize("longer", ["truncate", "mask"])
@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2, "loss_type": "bnpo", "beta": 0.1}], ids=str)
def test_the_weights_are_those_of_stock_trl_on_the_shorter_rows(longer, settings, tiny, tokenizer, tmp_path):
    settings = {**SMALL, "max_steps": 3, **settings}
    torch.manual_seed(0)
    plain = make(Plain, GRPOConfig, tiny(), tokenizer, tmp_path / "trl", letters, **settings)
    plain.longer = longer
    plain.train()
    ours = make(
        MathGRPOTrainer,
        MathGRPOConfig,
        tiny(),
        tokenizer,
        tmp_path / "ours",
        letters,
        advantage_eps=1e-4,
        max_seq_length_train=LIMIT,
        long_sequences=longer,
        logging_steps=1,
        **settings,
    )
    widest = []
    loss_of = ours._loss_of

    def loss(model, rows):
        tokens = rows["completion_mask"].sum(dim=1)
        widest.append(((rows["prompt_mask"].sum(dim=1) + tokens) * (tokens > 0)).max().item())
        return loss_of(model, rows)

    ours._loss_of = loss
    ours.train()
    assert relative(weights(ours.model), weights(plain.model)) < 1e-6
    shares = [line[metrics.OVER_TRAIN_LENGTH] for line in ours.state.log_history if metrics.OVER_TRAIN_LENGTH in line]
    assert 0 < max(shares) < 1
    assert max(widest) == LIMIT or (longer == "mask" and 0 < max(widest) < LIMIT)


def test_columns_that_nothing_is_left_in_are_dropped_for_every_tensor_of_the_completions():
    rows = {
        "prompt_ids": torch.ones(2, 3, dtype=torch.long),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.ones(2, 6, dtype=torch.long),
        "completion_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]),
        "old_per_token_logps": torch.zeros(2, 6),
        "importance_sampling_ratio": torch.ones(2, 1),
        "advantages": torch.ones(2),
        "num_items_in_batch": torch.tensor(7),
    }
    shorter, over = limited(rows, 5, "truncate")
    assert over.tolist() == [True, False]
    assert shorter["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert {name: tuple(value.shape) for name, value in shorter.items()} == {
        "prompt_ids": (2, 3),
        "prompt_mask": (2, 3),
        "completion_ids": (2, 3),
        "completion_mask": (2, 3),
        "old_per_token_logps": (2, 3),
        "importance_sampling_ratio": (2, 1),
        "advantages": (2,),
        "num_items_in_batch": (),
    }


def test_the_ratio_of_a_token_that_is_padding_or_left_out_is_1():
    """vespo takes the product of a row's ratios, whether the loss counts their tokens or not."""
    mask, ratio = torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([[0.5, 0.6, 0.7], [0.8, 1.0, 1.0]])
    rows = {"prompt_mask": mask[:, :2], "completion_mask": mask, "importance_sampling_ratio": ratio}
    narrow = {name: value[:, :2] for name, value in rows.items()}
    padded = join([narrow, rows])["importance_sampling_ratio"]
    assert torch.equal(padded[:2], torch.tensor([[0.5, 0.6, 1.0], [0.8, 1.0, 1.0]]))
    assert torch.equal(limited(rows, 4, "truncate")[0]["importance_sampling_ratio"], ratio[:, :2])
    masked = limited(rows, 4, "mask")[0]["importance_sampling_ratio"]
    assert torch.equal(masked, torch.tensor([[1.0], [0.8]]))


def test_the_loss_counts_no_token_that_a_tool_wrote():
    mask, tool = torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([[1, 0, 1], [1, 1, 1]])
    assert scored({"completion_mask": mask, "tool_mask": tool}).tolist() == [[1, 0, 1], [1, 1, 0]]
    assert scored({"completion_mask": mask}).tolist() == mask.tolist()


def test_the_shortest_row_is_one_with_a_token_if_any_has_one():
    rows = {"completion_mask": torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0]]), "advantages": torch.arange(3)}
    assert shortest(rows)["advantages"].tolist() == [2]
    none = {"completion_mask": torch.zeros(2, 3, dtype=torch.long), "advantages": torch.arange(2)}
    assert shortest(none)["advantages"].tolist() == [0]


def test_two_prompts_of_one_length_are_two():
    ids = torch.tensor([[5, 6, 7], [5, 9, 7], [5, 6, 8]])
    assert layout(ids, torch.ones_like(ids), 1) == ([(5, 6), (5, 9), (5, 6)], [2, 2, 2], [1, 1, 1])
    row = pack(ids, torch.ones_like(ids), 1)
    assert row.input_ids.tolist() == [[5, 6, 6, 5, 9]]
    assert row.groups == (GroupLayout(0, 1, (1, 1)), GroupLayout(3, 1, (1,)))
    assert unpack(torch.tensor([[1.0, 3.0, 2.0]]), row).tolist() == [[1.0], [2.0], [3.0]]
