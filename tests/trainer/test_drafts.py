"""TRL writes a rollout into a draft, and the draft is written into the trainer once: TRL's own dict and table."""

from copy import deepcopy

import pytest
import torch
from datasets import Dataset
from small_trainers import KINDS, letters, make, relative, weights
from small_vision import images, small_llava
from trl import GRPOTrainer

from grpo_math.errors import ConfigError
from grpo_math.run import metrics
from grpo_math.trainer.trainer import MathGRPOTrainer


def rollout_of(trainer, inputs, seed=5):
    """The dict, the table and the metrics of a rollout."""
    torch.manual_seed(seed)
    rows = trainer._generate_and_score_completions(deepcopy(inputs))
    mode = "train" if trainer.model.training else "eval"
    return rows, deepcopy(trainer._logs), {name: list(values) for name, values in trainer._metrics[mode].items()}


def same_as_trl(ours, trls):
    (rows, table, log), (trl_rows, trl_table, trl_log) = ours, trls
    assert set(rows) - set(trl_rows) == {"group"}
    for name, value in trl_rows.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(rows[name], value, rtol=0, atol=1e-6)
    for name in ("prompt", "completion", "images"):
        assert list(table[name]) == list(trl_table[name])
    assert {name: list(values) for name, values in table["rewards"].items()} == {
        name: list(values) for name, values in trl_table["rewards"].items()
    }
    for name, values in trl_log.items():
        assert log[name] == pytest.approx(values, abs=1e-6), name


def reward(completions, **columns):
    return letters([completion[0]["content"] for completion in completions])


def test_a_rollout_and_an_update_with_images_are_trls(tmp_path):
    model, processor = small_llava(tmp_path / "model")
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {i} + 4?"}], "image": image}
        for i, image in enumerate(images(4))
    ]
    ends, rollouts = [], []
    for kind in ("ours", "trl"):
        settings = {"beta": 0.1, "log_completions": True, "num_completions_to_print": 0, "log_multimodal": True}
        trainer = make(
            **KINDS[kind],
            model=model,
            tokenizer=processor,
            folder=tmp_path / kind,
            rewards=reward,
            rows=Dataset.from_list(rows),
            max_steps=1,
            **settings,
        )
        trainer.model.train()
        rollouts.append(rollout_of(trainer, [row for row in rows[:2] for _ in range(4)]))
        trainer.train()
        ends.append(weights(trainer.model))
    same_as_trl(*rollouts)
    assert len(rollouts[0][1]["images"]) == 8
    assert relative(*ends) < 1e-6


def one(completions, **columns):
    return [float(len(text)) for text in completions]


def other(completions, **columns):
    return [float(ord(text[0])) if text else None for text in completions]


other.__name__ = "one"
INPUTS = [{"prompt": f"{number} + 4?"} for number in range(8) for _ in range(4)]


@pytest.mark.parametrize(
    ("trains", "n"), [(True, 8), (False, 32)], ids=["training", "an evaluation wider than TRL's table"]
)
def test_two_reward_functions_of_one_name_are_logged_as_trl_logs_them(trains, n, ours):
    rollouts = []
    for kind in ("ours", "trl"):
        trainer = ours([one, other], folder=kind, reward_weights=[1.0, 0.25], **KINDS[kind])
        trainer.model.train(trains)
        rollouts.append(rollout_of(trainer, INPUTS[:n]))
    same_as_trl(*rollouts)
    assert len(rollouts[0][1]["prompt"]) == 8


def test_a_reward_reads_the_metrics_and_completions_of_earlier_steps(ours):
    seen, ends, trainers = {kind: [] for kind in KINDS}, [], []

    def reads(completions, trainer_state, **columns):
        kind, trainer = list(KINDS)[len(trainers) - 1], trainers[-1]
        values, last = trainer._metrics["train"], trainer._logs["completion"]
        seen[kind].append(([*values["reward"]], [*last], [*trainer._logs["rewards"]["reads"]], [*values["own"]]))
        values["own"] = [float(len(values["reward"]))]  # in place of the last one, as TRL counts tokens
        return [float(text in last or len(text) % 3) for text in completions]

    for kind in KINDS:
        trainers.append(ours(reads, folder=kind, **KINDS[kind], max_steps=3, logging_steps=3))
        trainers[-1].train()
        ends.append((weights(trainers[-1].model), trainers[-1].state.log_history[0]["own"]))
    assert seen["ours"] == seen["trl"]
    assert [len(rewards) for rewards, *_ in seen["trl"]] == [0, 1, 2]
    assert relative(ends[0][0], ends[1][0]) < 1e-6
    assert ends[0][1] == ends[1][1] == 2.0


def test_a_reward_that_evaluates_gets_the_completions_of_its_own_rollout(ours):
    rollouts, trainers = [], []

    def evaluates(completions, **columns):
        if trainers[-1].model.training:
            trainers[-1].evaluate()
            trainers[-1].model.train()
        return letters(completions)

    rows = {"eval_dataset": Dataset.from_list(INPUTS[:8]), "per_device_eval_batch_size": 8, "num_generations_eval": 2}
    for kind in ("ours", "trl"):
        trainers.append(ours(evaluates, folder=kind, **rows, **KINDS[kind]))
        trainers[-1].model.train()
        rollouts.append(rollout_of(trainers[-1], INPUTS[:8]))
        assert trainers[-1].state.log_history
    same_as_trl(*rollouts)
    assert len(rollouts[0][1]["extra"]["group"]) == 8


def positive(rows):
    return rows["advantages"].clamp(min=0) * 3


# What a patch of TRL's method returns as advantages, and settings of ours.
PATCHES = {
    "a shape": (positive, {}),
    "an advantage of each token": (lambda rows: positive(rows)[:, None] * rows["completion_mask"], {}),
    "no change": (lambda rows: rows["advantages"], {"baseline": "leave_one_out"}),
    "another baseline": (positive, {"baseline": "leave_one_out"}),
    "another eps": (positive, {"advantage_eps": 1e-6}),
    "another scale": (positive, {"scale_rewards": "mean"}),
    "few completions": (positive, {"train_completions": 2}),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_of_trls_class_that_changes_advantages_is_trained_on_or_refused(patch, ours, monkeypatch, caplog):
    reshape, settings = PATCHES[patch]
    generate = GRPOTrainer._generate_and_score_completions

    def patched(self, inputs):
        rows = generate(self, inputs)
        return {**rows, "advantages": reshape(rows)}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", patched)
    trainer = ours(one, folder="ours", max_steps=2, **settings)
    line = "A patch of GRPOTrainer._generate_and_score_completions has changed the advantages"
    if settings and reshape is positive:
        with pytest.raises(ConfigError, match=r"does not work with a patch of .*_generate_and_score_completions"):
            trainer.train()
        return
    trainer.train()
    assert caplog.text.count(line) == (not settings)
    if not settings:
        trl = ours(one, folder="trl", max_steps=2, **KINDS["trl"])
        trl.train()
        assert relative(weights(trainer.model), weights(trl.model)) < 1e-6


def test_the_column_reward_is_what_a_subclass_made_of_the_rewards(ours):
    class Squares(MathGRPOTrainer):
        def _calculate_rewards(self, *arguments):
            return super()._calculate_rewards(*arguments) ** 2

    trainer = ours(one, trainer_class=Squares)
    trainer.model.train()
    _, table, log = rollout_of(trainer, INPUTS[:8])
    assert (
        list(table["extra"]["reward"]) == list(table["rewards"]["one"]) == [n**2 for n in map(len, table["completion"])]
    )
    assert log[metrics.REWARD_MAX] == [max(table["rewards"]["one"])]


def test_a_subclass_with_rewards_of_its_own_is_not_graded(ours):
    class Own(MathGRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, ids):
            return torch.tensor([[float(len(text))] for text in completions])

    trainer = ours(one, [{"prompt": "3 + 4?", "answer": "7"}], trainer_class=Own, max_steps=1, logging_steps=1)
    trainer.train()
    assert metrics.ACCURACY not in trainer.state.log_history[0]
    assert not trainer._logs["extra"]


def test_a_snapshot_of_a_step_converts_nothing(ours, monkeypatch):
    """A run that is killed needs none, so each step would pay for it."""
    trainer = ours(max_steps=2, log_completions=True, num_completions_to_print=0, logging_steps=5)
    monkeypatch.setattr("grpo_math.trainer.table.as_json", lambda columns: pytest.fail("converted"))
    trainer.train()
    last = trainer.grpo_math.run.last_step
    assert last["table"]["prompt"] == list(trainer._logs["prompt"])
