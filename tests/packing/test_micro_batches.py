"""Rows, the plan of micro-batches, and their split, without a model."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from grpo_math.algorithm.loss_inputs import Normalizers
from grpo_math.algorithm.losses import LossSettings
from grpo_math.algorithm.rows import widths
from grpo_math.errors import OutOfMemory
from grpo_math.packing import micro_batches
from grpo_math.packing.micro_batches import (
    MicroBatch,
    OptimizerStep,
    TokenBudget,
    UpdatePlanner,
    accumulate,
    row_layout,
)
from grpo_math.packing.row_plan import packed_tokens, plan_micro_batches

BUDGET = 10  # tokens: the longer group of two completions


def planner(synchronised=(), **changed):
    """``synchronised`` gets whether each backward pass synchronises ranks."""
    gradients = SimpleNamespace(sync_gradients=True)
    gradients._set_sync_gradients = partial(setattr, gradients, "sync_gradients")
    accelerator = SimpleNamespace(
        num_processes=1,
        process_index=0,
        device="cpu",
        is_fsdp2=False,
        gradient_state=gradients,
        no_sync=lambda model: nullcontext(),
        backward=lambda loss, **options: synchronised.append(gradients.sync_gradients) or loss.backward(),
    )
    settings = {"loss_type": "grpo", "keep_trl_batches": False, "skip_zero_advantage": True, "deepspeed": False}
    return UpdatePlanner(accelerator, **{**settings, **changed})


def micro_batch(first, advantages):
    """Completions of 4 and 3, and of 2 and 1 tokens, for two prompts of 4."""
    prompts = torch.arange(first, first + 8).reshape(2, 4).repeat_interleave(2, dim=0)
    ones = torch.ones(4, 4, dtype=torch.long)
    return {
        "prompt_ids": prompts,
        "prompt_mask": ones,
        "completion_ids": torch.arange(100, 116).reshape(4, 4),
        "completion_mask": ones.tril().flip(0),
        "advantages": torch.tensor(advantages),
    }


BATCHES = [micro_batch(1, [1.0, -2.0, 3.0, -4.0]), micro_batch(20, [5.0, -5.0, 7.0, -7.5])]


LOSSES = {  # of the products of advantages and weight (B, T), the mask, and the tokens of TRL's micro-batch
    "grpo": lambda values, mask, tokens: (values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean(),
    "bnpo": lambda values, mask, tokens: (values / tokens.view(-1, 1)).sum(),
    "dapo": lambda values, mask, tokens: values.sum() / 100,
}


@pytest.mark.parametrize("budget", [BUDGET, 10**6], ids=["several a step", "one"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_micro_batches_of_a_step_have_the_gradient_of_trls_also_when_they_are_split_again(loss_type, budget):
    weight = torch.ones((), requires_grad=True)

    def loss_of(rows):
        mask = rows["completion_mask"]
        values = rows["advantages"][:, None] * weight * mask
        return LOSSES[loss_type](values, mask, rows.get("micro_batch_tokens", mask.sum()))

    synchronised = []
    whole, ours = sum(loss_of(rows) for rows in BATCHES), planner(synchronised, loss_type=loss_type)
    steps = ours.gather_planned(BATCHES, budget)
    assert [len(step.micro_batches) for step in steps] == ([2, 2] if budget == BUDGET else [0, 1])
    losses = [
        accumulate(step.micro_batches, lambda one: loss_of(one.rows) * one.weight, None, ours.ranks, False)
        for step in steps
    ]
    # All but the last backward pass of each step, which the caller does.
    assert synchronised == ([False, False] if budget == BUDGET else [])
    for loss in losses:
        ours.ranks.backward(loss)
    assert synchronised[-2:] == [True, True]
    torch.testing.assert_close(sum(losses), whole)
    torch.testing.assert_close(weight.grad, torch.autograd.grad(whole, weight, retain_graph=True)[0])
    again = [part for step in steps for micro_batch in step.micro_batches for part in ours.smaller(micro_batch, BUDGET)]
    assert len(again) == 4
    torch.testing.assert_close(sum(part.weight * loss_of(part.rows) for part in again), whole)


@pytest.mark.parametrize("hole", ["prompt_mask", "completion_mask", None])
def test_what_is_a_mean_over_a_micro_batch_and_rows_with_a_hole_are_regrouped_only_if_memory_runs_out(hole):
    batches = [dict(rows) for rows in BATCHES]
    if hole:
        batches[1][hole] = batches[1][hole] * torch.tensor([1, 0, 1, 1])
    ours = planner(loss_type="bnpo", keep_trl_batches=hole is None)
    kept = [step.micro_batches for step in ours.gather_planned(batches, BUDGET)]
    assert [[one.rows["completion_ids"].tolist() for one in step] for step in kept] == [
        [rows["completion_ids"].tolist()] for rows in batches
    ]
    smaller = ours.smaller(kept[0][0], BUDGET)
    assert len(smaller) == 2
    divisors = {one.rows["micro_batch_tokens"].unique().item() for one in smaller}
    assert divisors == {batches[0]["completion_mask"].sum().item()}


def test_a_step_without_signal_has_a_micro_batch_that_weighs_nothing():
    flat = [{**rows, "advantages": torch.zeros(4)} for rows in BATCHES]
    for deepspeed, expected in ((False, [[], [(1, 0.0)]]), (True, [[(1, 0.0)]] * 2)):
        steps = planner(deepspeed=deepspeed).gather_planned(flat, BUDGET)
        assert [[(len(of.rows["advantages"]), of.weight) for of in step.micro_batches] for step in steps] == expected
        assert [(step.skipped_rows, step.skipped_tokens.item()) for step in steps] == [(4, 10), (4, 10)]
    # The first and the last completion have no signal.
    (step,) = planner().gather_planned([micro_batch(1, [0.0, 1.0, -1.0, 0.0])], BUDGET)
    assert (step.skipped_rows, step.skipped_tokens.item()) == (2, 4 + 1)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_last_training_step_synchronises_ranks_also_without_signal(loss_type):
    flat = {**BATCHES[1], "advantages": torch.zeros(4)}
    steps = planner(loss_type=loss_type).gather_planned([BATCHES[0], flat], BUDGET)
    assert steps[-1].micro_batches, "ranks would end the optimizer step with gradients of their own"


def test_a_rank_with_fewer_micro_batches_than_another_adds_masked_rows(monkeypatch):
    """The second rank takes the completions of 2 tokens of both ranks. The first has one of 4 tokens."""
    rows = {**BATCHES[0], "advantages": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    other_rank = ([row_layout(BATCHES[1])._replace(completion_tokens=[0, 0, 2, 0])], widths(BATCHES[1]))
    monkeypatch.setattr(micro_batches, "gather_object", lambda local: [*local, other_rank])
    monkeypatch.setattr(distributed, "all_to_all_single", lambda received, sent, *lengths: received.copy_(sent[:1]))
    (step,) = planner().gather_planned([rows], 7)
    assert [(one.weight, one.completions) for one in step.micro_batches] == [(0.25, 1), (0.0, 0)]
    assert [one.rows["completion_mask"].sum() for one in step.micro_batches] == [4, 0]


@pytest.mark.parametrize("synchronises", [True, False])
def test_fsdp2_synchronises_in_the_last_backward_pass_if_the_training_step_does(synchronises):
    seen, accelerator = [], planner([]).ranks
    model = SimpleNamespace(set_requires_gradient_sync=seen.append)
    accelerator.is_fsdp2, accelerator.gradient_state.sync_gradients = True, synchronises
    for n, expected in ((1, []), (2, [synchronises])):
        accumulate(
            [MicroBatch({}, 1.0, 1)] * n, lambda one: torch.ones((), requires_grad=True), model, accelerator, False
        )
        assert seen == expected


def test_out_of_memory_halves_the_largest_micro_batch_until_each_has_one_completion():
    ours, budget = planner(), TokenBudget(0, is_single_process=True)
    steps = ours.gather_planned(BATCHES, 10**6)
    step = OptimizerStep(LossSettings(), Normalizers(), ours, plans=True, done=steps[:1], current=steps[1])
    # The groups have 3 + 7 and 3 + 3 tokens. At half of 16, a group of 10 is split in two.
    for most, expected in ((16, [16, 16]), (8, [6, 6, 6, 6, 7, 7]), (3, [4, 4, 5, 5, 6, 6, 7, 7])):
        step.split(budget, "out of memory\nmore")
        sizes = [packed_tokens(*row_layout(one.rows)[:3]) for step in steps for one in step.micro_batches]
        assert (budget.tokens, budget.state_dict(), sorted(sizes)) == (most, {"halved_to": most}, expected)
    with pytest.raises(OutOfMemory, match=r"of one completion, 7 tokens with its prompt: .* \(out of memory\)"):
        step.split(budget, "out of memory\nmore")


@pytest.mark.parametrize(
    ("splits", "remedy"),
    [
        (False, "of 70 tokens: lower per_device_train_batch_size"),
        (True, "of 70 tokens: set max_tokens_per_micro_batch to 35"),
    ],
)
def test_an_update_that_cannot_be_computed_again_in_parts_ends_with_a_remedy(splits, remedy):
    with pytest.raises(OutOfMemory, match=remedy):
        TokenBudget(0, is_single_process=not splits).halve(50, 70, "out of memory", splits)


def tokens(rows, prompts, prompt_tokens, lengths):
    return sum({prompts[r]: prompt_tokens[r] - 1 for r in rows}.values()) + sum(lengths[r] for r in rows)


@st.composite
def batches(draw):
    groups, size = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    of_group = draw(st.lists(st.integers(1, 50), min_size=groups, max_size=groups))
    lengths = draw(st.lists(st.integers(0, 60), min_size=groups * size, max_size=groups * size))
    order = draw(st.permutations(range(groups * size)))
    return [r // size for r in order], [of_group[r // size] for r in order], [lengths[r] for r in order]


@settings(deadline=None, max_examples=100)
@given(batches(), st.integers(1, 400), st.integers(1, 5))
def test_rows_are_neither_lost_nor_doubled_and_the_budget_holds(batch, budget, ranks):
    prompts, prompt_tokens, lengths = batch
    plan = plan_micro_batches(prompts, prompt_tokens, lengths, budget, ranks)
    assert len(plan) == ranks
    assert sorted(row for rank in plan for rows in rank for row in rows) == [r for r, n in enumerate(lengths) if n]
    for rank in plan:
        assert [] not in rank
        for rows in rank:
            assert tokens(rows, prompts, prompt_tokens, lengths) <= budget or len(rows) == 1


@pytest.mark.parametrize(("prompts", "most"), [("abcdefgh", 190), ("aaaaaaaa", 210)])
def test_ranks_get_near_equal_tokens_also_of_one_group(prompts, most):
    lengths = [90, 10, 20, 30, 40, 50, 60, 70]
    plan = plan_micro_batches(prompts, [1] * 8, lengths, budget=1000, ranks=2)
    assert max(sum(lengths[row] for rows in rank for row in rows) for rank in plan) <= most
