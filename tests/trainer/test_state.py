"""The state of a trainer in a checkpoint comes back: a run that stops, within a rollout too, loses nothing."""

import random

import numpy
import pytest
import torch
from datasets import Dataset
from launching import TORCHRUN, run
from peft import LoraConfig, get_peft_model
from small_families import tiny_model
from small_trainers import Evaluated, untimed, weights
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.trainer_utils import IntervalStrategy

from grpo_math.errors import RewardError, UserError
from grpo_math.run import checkpoints
from grpo_math.trainer import state
from grpo_math.trainer.rollout_queue import order
from grpo_math.trainer.trainer_parts import Program

# Two optimizer steps train on each rollout, and a line of the log is about two: each odd step is in the middle of both.
RUN = {
    "per_device_train_batch_size": 4,
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 2,
    "resample_groups": 1,
    "train_completions": 3,
    "max_steps": 6,
    "logging_steps": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 4,
    "log_completions": True,
    "num_completions_to_print": 0,
}


def drawn(completions, **columns):
    """A reward by all generators whose state a checkpoint has."""
    return [len(text) % 3 + random.random() + numpy.random.random() + torch.rand(()).item() for text in completions]


ROWS = [{"prompt": f"What is {i}?", "answer": "7"} for i in range(16)]  # more than six steps see


def ends_as(again, whole):
    assert torch.equal(weights(again.model), weights(whole.model))
    assert again._logs == whole._logs
    for line, expected in zip(untimed(again), untimed(whole), strict=True):
        assert line == pytest.approx(expected, nan_ok=True)


def test_a_run_that_goes_on_in_the_middle_of_a_rollout_or_after_a_failed_step_ends_as_one_that_was_not_stopped(
    ours, tmp_path
):
    rows = ROWS[:8]  # an epoch has four steps, and the second one another order
    whole = ours(drawn, rows, **RUN)
    whole.train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (3, 4, 5, 6)}
    for step in (3, 4, 6):
        again = ours(drawn, rows, **RUN)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        ends_as(again, whole)
    settings = {**RUN, "folder": "failing", "save_steps": 100}
    failing = ours(drawn, rows, **settings, max_nonfinite_steps=1)
    norm, nan = failing._get_grad_norm, {3: float("nan")}
    failing._get_grad_norm = lambda model, grad_norm=None: norm(model, nan.get(failing.state.global_step, grad_norm))
    with pytest.raises(UserError, match=r"not finite in step 4: the weights are still those of step 3"):
        failing.train()
    # A kill while a later one was written: transformers would take it.
    (tmp_path / "failing/checkpoint-4").mkdir()
    (tmp_path / "failing" / checkpoints.UNFINISHED.format("checkpoint-4")).touch()
    again = ours(drawn, rows, **settings)
    again.train(resume_from_checkpoint=True)
    ends_as(again, whole)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_weights_with_other_names_on_the_hub_are_resumed_and_loaded_as_the_best(family, ours, tmp_path):
    tiny_model(family).save_pretrained(tmp_path / "model")
    settings = {"model": str(tmp_path / "model"), "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    settings |= {"model_init_kwargs": {"dtype": "bfloat16"}, "bf16": True}
    whole, again, best = (ours(drawn, ROWS, **settings) for _ in range(3))
    for one in (whole, again, best):
        one.model.lm_head.float()  # as some scripts do
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    best.state.best_model_checkpoint = str(tmp_path / "checkpoint-2")
    best._load_best_model()
    for one in (again, best):
        assert torch.equal(weights(one.model), weights(whole.model))


def test_an_adapter_in_16_bit_and_its_reference_are_resumed_and_loaded_as_the_best_in_their_precision(
    ours, small, tmp_path
):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "learning_rate": 1.0}
    settings |= {"beta": 0.5, "reference_refresh_steps": 1}
    ends = []
    for checkpoint in (None, "checkpoint-1"):
        base = AutoModelForCausalLM.from_pretrained(small, dtype=torch.bfloat16)
        torch.manual_seed(3)
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        trainer = ours(drawn, ROWS, model=get_peft_model(base, adapter, autocast_adapter_dtype=False), **settings)
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / checkpoint))
        ends.append(weights(trainer.model))
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    trainer._load_best_model()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert torch.equal(*ends)
    assert not torch.equal(weights(trainer.model), ends[0])
    assert not (tmp_path / "checkpoint-1/ref").exists()


@pytest.mark.slow
def test_a_resumed_run_trains_the_adapter_of_a_4_bit_base_in_the_same_precision(ours, tiny, tmp_path, bitsandbytes):
    def trainer():
        quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(tiny("wide"), quantization_config=quantised, dtype=torch.bfloat16)
        torch.manual_seed(3)
        adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
        return ours(drawn, ROWS, model=model, peft_config=adapter, **saving)

    whole, again = trainer(), trainer()
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    pairs = zip(*(dict(one.model.named_parameters()).items() for one in (whole, again)), strict=True)
    adapters = [(a, b) for (name, a), (_, b) in pairs if "lora_" in name]
    assert {a.dtype for a, _ in adapters} == {torch.bfloat16}
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in adapters)


@pytest.mark.slow
def test_a_resumed_run_takes_the_options_of_the_optimizer_from_its_own_settings(ours, tmp_path):
    """Those of the checkpoint are in the state of the optimizer and of the schedule."""
    settings = {"optim": "adamw_torch", "logging_steps": 1, "lr_scheduler_type": "linear", "warmup_steps": 0}
    settings |= {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    ours(drawn, ROWS, **settings).train()
    changed = {"learning_rate": 0.01, "weight_decay": 0.5, "adam_beta1": 0.5, "adam_epsilon": 0.1, "max_steps": 4}
    again = ours(drawn, ROWS, **settings | changed, folder="again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    rates = {line["step"]: line["learning_rate"] for line in again.state.log_history if "learning_rate" in line}
    assert rates == pytest.approx({1: 0.05, 2: 0.01 * 3 / 4, 3: 0.01 / 2, 4: 0.01 / 4})
    # As transformers suggests, and without a call of its method.
    replaced = ours(drawn, ROWS, **settings, folder="replaced")
    replaced.create_scheduler = lambda *_, **__: setattr(
        replaced, "lr_scheduler", LambdaLR(replaced.optimizer, lambda _: 1.0)
    )
    replaced.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert replaced.state.global_step == 2
    decays, plain = again.optimizer.param_groups
    assert (decays["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    assert (decays["betas"][0], plain["eps"]) == (0.5, 0.1)


@pytest.mark.slow
def test_a_resumed_run_with_a_schedule_by_its_metric_takes_all_options_but_the_rate(ours, tmp_path):
    held_out = {"eval_dataset": Dataset.from_list(ROWS), "eval_strategy": "steps", "eval_steps": 1}
    settings = {"optim": "adamw_torch", "lr_scheduler_type": "reduce_lr_on_plateau", "max_steps": 2, **held_out}
    ours(drawn, ROWS, **settings, save_strategy="steps", save_steps=1).train()
    changed = {"weight_decay": 0.5, "adam_beta1": 0.5, "learning_rate": 1.0}
    again = ours(drawn, ROWS, **settings | changed, folder="again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    decays = again.optimizer.param_groups[0]
    assert (decays["weight_decay"], decays["betas"][0], decays["lr"]) == (0.5, 0.5, 0.05)


def test_a_failing_script_that_saves_no_checkpoint_gets_none(ours, tmp_path):
    def fails(completions, trainer_state, **columns):
        if trainer_state.global_step:
            raise ConnectionError("the judge is down")
        return drawn(completions)

    trainer = ours(fails, ROWS, **{**RUN, "save_strategy": "no", "steps_per_generation": 2})
    with pytest.raises(RewardError, match=r"the judge is down[^(]*$"):
        trainer.train()
    assert trainer.state.global_step
    assert not [*tmp_path.glob("checkpoint-*")]


def test_a_second_call_whose_evaluation_fails_saves_its_own_step_and_a_third_one_evaluates_it_again(ours):
    def evaluate():
        random_states.append(torch.get_rng_state())
        if len(random_states) == 2:
            raise RewardError("the judge is down")
        return {}

    random_states, trainer = [], ours(max_steps=1, save_strategy="steps")
    trainer.args.eval_strategy, trainer.args.eval_steps = IntervalStrategy.STEPS, 1
    trainer.grpo_math.program = Program(evaluate_heldout=evaluate)
    trainer.train()
    with pytest.raises(RewardError, match=r"\(checkpoint-1 is saved: "):
        trainer.train()
    trainer.args.max_steps = 2
    trainer.train(resume_from_checkpoint=True)
    assert [torch.equal(random_states[2], other) for other in random_states] == [False, True, True, False]


@pytest.mark.slow
def test_an_evaluation_that_fails_saves_its_step_and_is_repeated(ours, tmp_path):
    down = []

    def reward(completions, trainer_state, **columns):
        if down and trainer_state.global_step == 3 and columns["answer"][0] == "eval":
            raise ValueError("no reward today")
        return drawn(completions)

    settings = {**RUN, "max_steps": 5, "save_strategy": "no", "per_device_eval_batch_size": 8}
    settings |= {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_dataset": Dataset.from_list([{**ROWS[0], "answer": "eval"}]),
    }
    whole = ours(reward, ROWS, **settings)
    whole.train()
    down.append(True)
    with pytest.raises(RewardError, match=r"no reward today.*\(checkpoint-3 is saved: "):
        ours(reward, ROWS, **settings, folder="failing").train()
    down.clear()
    again = ours(reward, ROWS, **settings, folder="failing")
    again.add_callback(events := Evaluated())
    again.train(resume_from_checkpoint=True)
    assert len(events.metrics) == 3  # of steps 3, 4 and 5
    ends_as(again, whole)


def test_with_another_batch_the_half_trained_rollout_is_sampled_again(ours):
    trainer = ours(drawn, ROWS, **{**RUN, "max_steps": 1, "save_strategy": "no"})
    trainer.train()
    run = trainer.grpo_math.run
    held = run.state_dict()
    assert (held["_step"], len(held["rollout"])) == (2, 4)
    assert [*trainer._logs["extra"]["group"]] == [number for number in range(4) for _ in range(4)]
    position = held["resampler"]["position"]
    held |= {"nonfinite": {"in_a_row": 2}, "budget": {"halved_to": 60}, "batch_settings": {"world_size": 0}}
    del held["resampler"]  # a run that did not resample
    run.load_state_dict(held)
    assert (trainer._buffered_inputs, trainer.grpo_math.queue.resampler.position) == (None, position)
    assert (trainer.grpo_math.nonfinite.in_a_row, trainer.grpo_math.updates.budget.tokens) == (2, 60)
    trainer.num_iterations, trainer._buffered_inputs = 2, ["half"]
    for step, in_rollout in ((4, True), (8, False)):  # twice over a rollout of four micro-batches
        trainer._step = step
        assert (run.state_dict()["rollout"] == ["half"]) == in_rollout


def test_a_rollout_that_is_sampled_again_ends_with_its_prompts(ours, tmp_path):
    """A step was two training steps, and is one now: the checkpoint's position in the rollout is another one."""
    settings = {**RUN, "resample_groups": 0}
    ours(drawn, ROWS, **{**settings, "max_steps": 1}).train()
    again = ours(drawn, ROWS, **{**settings, "max_steps": 5, "gradient_accumulation_steps": 1})
    sample, sampled = again._generate_single_turn, []
    again._generate_single_turn = lambda prompts, *others: sampled.append(prompts[::4]) or sample(prompts, *others)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    rows = order(again.grpo_math.queue.sampler, 0)
    prompts = again._tokenize_prompts([ROWS[row]["prompt"] for row in rows])[0]
    assert sampled == [prompts[:4], prompts[4:8]]


@pytest.mark.parametrize("settings", [{"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}, {"train_completions": 2}])
def test_a_rollout_that_was_made_or_split_for_other_settings_is_sampled_again(settings, ours):
    trainer = ours(drawn, ROWS, **{**RUN, "max_steps": 1, "save_strategy": "no"})
    trainer.train()
    held = trainer.grpo_math.run.state_dict()
    for others, is_kept in (({}, True), (settings, False)):
        again = ours(drawn, ROWS, **{**RUN, **others})
        again.grpo_math.run.load_state_dict(held)
        assert (again._buffered_inputs is not None) == is_kept


def test_a_rank_without_a_file_takes_the_first_ones_only_between_two_rollouts(tmp_path):
    device = torch.device("cpu")
    assert state.agree_on_state(tmp_path, 1, device) is None
    for rollout in ([], None):
        torch.save({"rollout": rollout}, tmp_path / "state_0.pt")
        assert state.agree_on_state(tmp_path, 0, device) == {"rollout": rollout}
        assert state.agree_on_state(tmp_path, 1, device) == (None if rollout == [] else {"rollout": None})


READ = """
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from grpo_math.trainer import state
from grpo_math.trainer.rollout_queue import order

ranks, folder = PartialState(cpu=True), Path(sys.argv[1])
for there in (0, 1):  # the ranks that have left their file
    if ranks.process_index == there:
        torch.save({"rollout": there}, folder / f"state_{there}.pt")
    ranks.wait_for_everyone()
    held = state.agree_on_state(folder, ranks.process_index, ranks.device)
    assert held == ({"rollout": ranks.process_index} if there else None), held
ranks.wait_for_everyone()
torch.distributed.destroy_process_group()  # a process that ends while gloo's threads run may abort
"""


@pytest.mark.full
def test_a_rank_whose_file_is_missing_keeps_the_others_from_going_on_with_theirs(tmp_path):
    program = tmp_path / "read.py"
    program.write_text(READ)
    run([*TORCHRUN, str(program), str(tmp_path)])
