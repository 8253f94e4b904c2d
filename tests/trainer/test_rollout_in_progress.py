"""A rollout: gold answers and verdicts, advantages, and dynamic sampling."""

import json
import math
from itertools import combinations
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset, IterableDataset
from small_trainers import KINDS, grades, logps_of, problems, relative, results_of, weights
from transformers import AutoModelForCausalLM, TrainerCallback

from grpo_math import MathGRPOConfig, MathGRPOTrainer, evaluate
from grpo_math.algorithm.correction import sampler_weights
from grpo_math.algorithm.resample import Resampler
from grpo_math.errors import ConfigError, RewardError
from grpo_math.grading import Grade, Verdict, grade_batch
from grpo_math.run import metrics
from grpo_math.settings.recipe import METHODS
from grpo_math.system.collectives import Ranks
from grpo_math.trainer import grader as module
from grpo_math.trainer import run_files
from grpo_math.trainer.grader import Grader
from grpo_math.trainer.loss_settings import loss_settings
from grpo_math.trainer.reward_funcs import check_gold_answers
from grpo_math.trainer.trainer_parts import Program

ROWS = [{"prompt": "What is 3 + 4?", "answer": "7"}, {"prompt": "What is 2 + 2?", "answer": "4"}]


def test_the_grader_and_the_rewards_get_the_runs_time_limit_and_the_rows_formats(ours, monkeypatch):
    graded, told = Mock(wraps=grade_batch), []

    def reward(completions, grade_timeout, **columns):
        told.append(grade_timeout)
        return [0.0] * len(completions)

    monkeypatch.setattr(module, "grade_batch", graded)
    rows = [{**row, "answer_format": "gsm8k", "problem": "How many?"} for row in ROWS]
    ours(reward, rows, max_steps=1, grade_timeout=0.25).train()
    formats, problems = ["gsm8k"] * 8, ["How many?"] * 8
    assert graded.call_args.kwargs == {"answer_format": formats, "problems": problems, "timeout": 0.25}
    assert told == [0.25]


def test_a_thought_that_the_prompt_or_the_template_opens_and_that_does_not_end_has_no_answer(ours):
    trainer = ours("accuracy", ROWS)
    grader, texts = trainer.grpo_math.grader, ["It is 7.", "so </think> It is 7."]
    chat = [[{"role": "assistant", "content": text}] for text in texts]
    messages, row = [{"role": "user", "content": "3 + 4?"}], {"answer": "7"}

    def verdicts(prompt, completions):
        grades = grader.grade([{**row, "prompt": prompt}] * 2, completions, [[], []])
        return [str(grade.verdict) for grade in grades]

    assert verdicts("3 + 4? <think>\n", texts) == ["no_answer", "correct"]
    assert verdicts("3 + 4?", texts) == verdicts(messages, chat) == ["correct", "correct"]
    trainer.processing_class.chat_template += "<think>"
    assert verdicts(messages, chat) == ["no_answer", "correct"]
    # TRL may have parsed the text: then the tokens have the end of the thought.
    ids = [trainer.processing_class.encode(texts[1])]
    [grade] = grader.grade([{**row, "prompt": messages}], chat[:1], ids)
    assert grade.verdict == "correct"


@pytest.mark.parametrize("value", [["latex"], None])
def test_a_column_answer_format_of_the_user_is_passed_on_and_asks_for_no_format(value, ours):
    seen = []

    def mine(completions, answer_format, **columns):
        seen.extend(answer_format)
        return [float(len(completion)) for completion in completions]

    rows = [{"prompt": "3 + 4?", "answer": "7", "answer_format": value}] * 4
    trainer = ours([mine, "accuracy"], rows, max_steps=1, logging_steps=1)
    trainer.train()
    assert seen == [value] * 8
    assert "format_kept" not in trainer.state.log_history[0]
    results = evaluate(trainer, [{**rows[0], "id": "0", "problem": "3 + 4?"}])
    assert results["n"] == 1


def test_no_arguments_at_all_are_enough(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = MathGRPOTrainer(small, "accuracy", train_dataset=Dataset.from_list(ROWS))
    assert isinstance(trainer.args, MathGRPOConfig)
    assert "grpo_math" in trainer._tag_names


def by_grade(completions, grade, **columns):
    return [float(g.verdict == "correct") for g in grade]


def rows(*golds, column="solution"):
    return Dataset.from_list([{"prompt": f"What is {gold}?", column: gold} for gold in golds])


@pytest.mark.parametrize(
    "data", [rows(7, 8, column="answer"), rows("so $\\boxed{7}$", "#### 8"), rows("7", "8").to_iterable_dataset()]
)
def test_a_solution_is_graded_as_an_answer_is(data, ours, caplog):
    made = ours([by_grade, "accuracy"], data, max_steps=1)
    made.train()
    logged = {name: float(value) for name, value in made.state.log_history[0].items()}
    assert logged["accuracy"] == pytest.approx(logged["rewards/accuracy/mean"])
    assert logged["accuracy"] == pytest.approx(logged["rewards/by_grade/mean"])
    assert logged["grading/bad_gold"] == 0
    assert "gold" not in caplog.text


def test_rows_without_a_gold_are_said_once_and_are_ungradable(ours, caplog):
    made = ours("accuracy", rows("7", None), max_steps=2)
    made.train()
    assert caplog.text.count("1 of 2 rows of train_dataset have no gold answer (answer or solution)") == 1
    assert float(made.state.log_history[0]["grading/bad_gold"]) == 0.5


@pytest.mark.parametrize("reward", [by_grade, ["format_soft", by_grade], "accuracy"])
@pytest.mark.parametrize(
    "data",
    [
        Dataset.from_list([{"prompt": "1 + 1?", "target": "2", "answer": None}]),
        Dataset.from_list([{"prompt": "1 + 1?", "target": "2"}]).to_iterable_dataset(),
    ],
)
def test_a_reward_that_needs_golds_is_refused_before_weights_load(reward, data, ours):
    with pytest.raises(
        ConfigError, match=r"needs gold answers, and .*: give each row its gold in a column answer or solution"
    ):
        ours(reward, data, model="a/model-that-is-nowhere")


def test_rewards_that_read_no_gold_need_none():
    data = Dataset.from_list([{"prompt": "1 + 1?"}])
    output = check_gold_answers(["format_soft", lambda completions, grade=None, **columns: []], data)
    assert output.startswith("train_dataset has no gold")
    assert check_gold_answers(by_grade, None) is None


def test_rows_are_read_only_by_training_if_only_they_show_the_columns(ours):
    made = Mock(side_effect=lambda stored: {"prompt": ["1 + 1?"] * len(stored["q"]), "answer": stored["q"]})
    trainer = ours(by_grade, Dataset.from_dict({"q": list("78"), "completions": ["", ""]}).with_transform(made))
    Resampler(1, trainer.train_dataset, seed=0, group_size=2, ranks=None)
    run_files.settings_as_recipe(trainer)
    made.assert_not_called()
    rows_of_stream = iter([{"prompt": "1 + 1?"}])
    assert check_gold_answers(by_grade, IterableDataset.from_generator(lambda: rows_of_stream)) is None
    assert next(rows_of_stream) == {"prompt": "1 + 1?"}


@pytest.mark.parametrize("name", ["completions", "trainer_state"])
def test_a_column_that_training_would_replace_is_refused_before_weights_load(name, ours):
    data = rows("7", "8").add_column(name, ["a", "b"])
    with pytest.raises(ConfigError, match=f"dataset='train_dataset' has a column '{name}'"):
        ours(by_grade, data)
    assert not check_gold_answers(by_grade, rows("7").add_column("grade", [5])), "the user's column"


def test_the_list_of_functions_holds_the_users_objects_except_while_trl_calls_them(ours):
    class Scaled:
        __name__ = "scaled"
        scale = 1.0

        def __call__(self, completions, grade, **columns):
            seen.append(grade)
            return [self.scale] * len(completions)

    class Own(MathGRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, ids):
            if not by_itself:
                return super()._calculate_rewards(inputs, prompts, completions, ids)
            return torch.tensor([one(completions=completions) for one in self.reward_funcs]).T

    seen, by_itself, reward = [], False, Scaled()
    made = ours(reward, rows("7", "8").add_column("grade", [5, 5]), trainer_class=Own, max_steps=1, logging_steps=1)
    assert made.reward_funcs == [reward]
    reward.scale = 0.5
    made.train()
    assert (made.reward_funcs, seen[0]) == ([reward], [5] * len(seen[0]))
    assert made.state.log_history[0]["rewards/scaled/mean"] == 0.5
    by_itself = True
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'grade'"):
        made.train()


G = 4


def shaped(completions, **columns):
    """Differs within every group, whatever the verdicts: a shaped sum."""
    return [float(len(text) + i % 3) for i, text in enumerate(completions)]


def resampling(ours, kinds, **settings):
    trainer = ours(shaped, problems(kinds), per_device_train_batch_size=4 * G, resample_groups=2, **settings)
    trainer.grpo_math.grader.grade = grades
    return trainer


def history(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


def test_uniform_groups_give_way_and_the_rows_of_the_step_are_right(ours):
    trainer = resampling(ours, "eehu" * 12 + "m" * 16, logging_steps=1)
    with results_of(trainer, "_generate_and_score_completions") as last:
        trainer.train()
    names = (metrics.PROMPTS_DRAWN, metrics.PROMPTS_RETAINED, metrics.PROMPTS_DISCARDED, metrics.ACCURACY)
    drawn, kept, thrown, accuracy = (history(trainer, name) for name in names)
    assert [d - t for d, t in zip(drawn, thrown, strict=True)] == [4] * 5
    assert sum(kept) > sum(accuracy) * 4  # more mixed groups than were drawn at first
    texts = trainer.processing_class.batch_decode(last[0]["prompt_ids"], skip_special_tokens=True)
    groups = [texts[i : i + G] for i in range(0, 4 * G, G)]
    assert [len(set(group)) for group in groups] == [1] * 4
    assert sum(group[0].startswith("m") for group in groups) == kept[-1] > 0
    assert last[0]["num_items_in_batch"] == last[0]["completion_mask"].sum()
    advantages = last[0]["advantages"].view(-1, G)
    torch.testing.assert_close(advantages.mean(dim=1), torch.zeros(4), atol=1e-5, rtol=0)
    assert [prompt.split()[0] for prompt in trainer._logs["prompt"]] == [text.split()[0] for text in texts]
    assert len(trainer._logs["advantages"]) == len(trainer._logs["rewards"]["shaped"]) == 4 * G


def test_it_ends_after_the_last_round_judged_by_verdicts_and_logs_the_first_draw(ours):
    trainer, asked = resampling(ours, "e" * 12, max_steps=3, logging_steps=1), []
    trainer.grpo_math.grader.grade = lambda rows, completions, ids: (
        asked.extend(row["prompt"] for row in rows) or grades(rows, completions, ids)
    )
    trainer.train()
    # Four, and four more in each of two rounds: no problem twice in a step.
    assert [len({*asked[start : start + 12 * G]}) for start in range(0, len(asked), 12 * G)] == [12] * 3
    names = (metrics.PROMPTS_DRAWN, metrics.PROMPTS_RETAINED, metrics.ACCURACY, metrics.ALL_RIGHT)
    assert [history(trainer, name) for name in names] == [[12] * 3, [0] * 3, [1.0] * 3, [1.0] * 3]
    assert history(trainer, metrics.REWARD_STD)[0] > 0  # but verdicts are all the same


@pytest.mark.parametrize(
    ("step", "saved"),
    [(0, "$"), (2, r".* \(checkpoint-2 is saved: train\(resume_from_checkpoint=True\) continues from it\)$")],
)
def test_a_reward_that_raises_ends_the_run_after_a_checkpoint_of_the_steps_that_are_done(step, saved, ours, tmp_path):
    def reward(completions, trainer_state, **columns):
        if trainer_state.global_step == step:
            raise ValueError("no reward today")
        return shaped(completions)

    with pytest.raises(RewardError, match=f"no reward today[^(]*{saved}"):
        ours(reward, max_steps=3, save_strategy="steps").train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{step}"][: bool(step)]


class Budget(Exception):
    def __init__(self, spent, limit):
        super().__init__(f"{spent} of {limit}")
        self.spent = spent


@pytest.mark.parametrize(
    ("error", "recipe"), [(TimeoutError(110, "slow"), False), (Budget(3, 2), False), (KeyError("x"), True)]
)
def test_a_script_catches_the_type_that_its_reward_raises_and_a_recipe_has_one_line(error, recipe, ours):
    def reward(completions, **columns):
        raise error

    trainer = ours(reward, max_steps=1)
    trainer.grpo_math.program = Program(is_recipe=recipe)
    for call in (trainer.train, lambda: trainer.evaluate(trainer.train_dataset)):
        with pytest.raises(
            RewardError, match=f"^reward function reward raised {type(error).__name__}: [^\n]*$"
        ) as caught:
            call()
        if recipe:
            assert type(caught.value) is RewardError
        else:
            assert isinstance(caught.value, type(error))
            names = ("spent", "errno")
            assert [getattr(caught.value, name, None) for name in names] == [
                getattr(error, name, None) for name in names
            ]
        assert caught.value.__cause__ is error


def test_a_rank_without_the_error_raises_its_type_too(monkeypatch):
    trainer = SimpleNamespace(grpo_math=SimpleNamespace(program=Program()))
    grader = Grader(trainer, None, 1.0, None)
    for name, kind in ((f"{__name__}:Budget", Budget), ("builtins:TimeoutError", TimeoutError), ("a:b.c", RewardError)):
        monkeypatch.setattr(module, "agree_on_first", lambda _, name=name: name)
        error = grader._agree_on_failure(RewardError("one line"), None)
        assert isinstance(error, kind)
        assert str(error) == "one line"


def test_a_step_without_a_computed_completion_logs_nan_where_trl_has_a_value(ours, tmp_path):
    logged = []

    class Reader(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                logged.append([logs[name] for name in ("entropy", "clip_ratio/low_min", "clip_ratio/high_max")])

    def reward(completions, trainer_state, **columns):
        return shaped(completions) if trainer_state.global_step == 1 else [1.0] * len(completions)

    trainer = ours(reward, max_steps=4, logging_steps=1)
    trainer.add_callback(Reader())
    trainer.train()
    assert [[math.isnan(value) for value in values] for values in logged] == [
        [True] * 3,
        [False] * 3,
        *[[True] * 3] * 2,
    ]
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert ["entropy" in line for line in lines] == [False, True, False, False]


def test_a_subclass_may_make_prompts_of_any_column(ours):
    class Asking(MathGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return super()._generate_and_score_completions([{**row, "prompt": row["problem"]} for row in inputs])

    data = Dataset.from_list([{"problem": f"{n} + 1?", "target": "2"} for n in range(4)])
    ours(shaped, data, trainer_class=Asking, max_steps=1).train()
    with pytest.raises(ConfigError, match="has the columns problem, target, and no prompt"):
        ours(shaped, data)


@pytest.mark.parametrize(("surrogate", "advice"), [("reinforce", 0), ("clip", 1)])
def test_trls_advice_about_luspo_is_for_the_clip(surrogate, advice, ours, caplog):
    ours(shaped, loss_type="luspo", surrogate=surrogate, num_iterations=1)
    assert sum("When using `'luspo'` loss" in line for line in caplog.messages) == advice


def test_a_column_that_a_script_logs_for_some_draws_stays_with_its_rows(ours):
    def reward(completions, log_extra, **columns):
        calls.append(len(completions))
        if len(calls) > 1:
            log_extra("note", [f"{len(calls)}"] * len(completions))
        return shaped(completions)

    calls = []
    trainer = ours(
        reward, problems("e" * 4 + "m" * 12), per_device_train_batch_size=4 * G, resample_groups=2, max_steps=1
    )
    trainer.grpo_math.grader.grade = grades
    trainer.train()
    notes, columns = list(trainer._logs["extra"]["note"]), trainer._logs
    assert len(calls) > 1
    assert len(notes) == len(columns["prompt"]) == 4 * G
    assert {None} < set(notes) <= {None, "2", "3"}


def test_rows_keep_the_number_of_their_group_through_resampling_and_trls_shuffle(ours, monkeypatch):
    monkeypatch.setattr(Grader, "grade", lambda grader, *given: grades(*given))
    settings = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 4}
    trainer = ours("accuracy", problems("emhm"), resample_groups=2, max_steps=1, **settings)
    callback, optimizer_steps = TrainerCallback(), []
    callback.on_substep_end = lambda *_, **__: optimizer_steps.append(trainer.grpo_math.updates.step)
    trainer.add_callback(callback)
    trainer.train()
    rows = [one.rows for step in optimizer_steps[-1].done for one in step.micro_batches]
    assert rows
    prompts = {}
    for one in rows:
        assert one["group"].dtype == torch.int64
        for number, prompt, mask in zip(one["group"].tolist(), one["prompt_ids"], one["prompt_mask"], strict=True):
            prompts.setdefault(number, set()).add(tuple(prompt[mask > 0].tolist()))
    assert all(len(of_group) == 1 for of_group in prompts.values())
    assert set(prompts) <= set(trainer._logs["extra"]["group"])


def test_brevity_relates_a_length_to_the_right_completions_of_its_group(ours, monkeypatch):
    monkeypatch.setattr(Grader, "grade", lambda grader, *given: grades(*given))
    rows = [{**row, "prompt": "plus"} for row in problems("mhmu")]  # prompts do not tell groups apart
    trainer = ours(["accuracy", "brevity"], rows, max_steps=1, per_device_train_batch_size=16)
    trainer.train()
    table = trainer._logs
    columns = [table["extra"]["tokens"], table["extra"]["verdict"], table["rewards"]["brevity"]]
    kinds = []
    for start in range(0, 16, 4):
        tokens, verdicts, values = (list(column)[start : start + 4] for column in columns)
        right = [n for n, verdict in zip(tokens, verdicts, strict=True) if verdict == "correct"]
        mean = sum(right) / max(1, len(right))
        expected = [
            float("nan") if v == "crash" else -len(right) / 4 * n / max(1, mean)
            for n, v in zip(tokens, verdicts, strict=True)
        ]
        assert values == pytest.approx(expected, nan_ok=True)
        kinds.append(len(right))
    assert sorted(kinds) == [0, 0, 2, 2]


def test_a_group_that_two_ranks_share_is_whole_on_both(monkeypatch):
    ranks = [[(3, 1.0), (4, 0.0)], [(5, None), (6, 1.0)]]
    trainer = SimpleNamespace(num_generations=4, model=SimpleNamespace(training=True))
    monkeypatch.setattr(module, "gather_object", lambda own: [*ranks[0], *ranks[1]])
    for rank, own in enumerate(ranks):
        grader = Grader(trainer, Ranks(rank, 2, "cpu", gather=None), 1.0, None)
        groups = grader._gather_groups([Grade(Verdict.WRONG, "")] * 2, [[0] * n for n, _ in own])
        assert groups == [[*ranks[0], *ranks[1]]] * 2


def test_gdpo_normalises_each_reward_in_its_group_and_the_sum_over_the_batch(ours):
    def longer(completions, **columns):
        return [float(len(text)) for text in completions]

    def early(completions, **columns):
        return [float(sum(map(ord, text)) % 5) for text in completions]

    trainer = ours([longer, early], max_steps=1, **METHODS["gdpo"]["fields"])
    trainer.train()
    table = trainer._logs
    parts = [torch.tensor(list(table["rewards"][name])).view(-1, 4) for name in ("longer", "early")]
    summed = sum((part - part.mean(1, keepdim=True)) / (part.std(1, keepdim=True) + 1e-4) for part in parts)
    expected = (summed - summed.mean()) / (summed.std() + 1e-4)
    torch.testing.assert_close(torch.tensor(list(table["advantages"])).view(-1, 4), expected, atol=1e-5, rtol=1e-5)


def test_opo_weighs_each_reward_by_the_tokens_of_its_completion(ours):
    trainer = ours(shaped, max_steps=1, **METHODS["opo"]["fields"])
    with results_of(trainer, "_generate_and_score_completions") as results:
        trainer.train()
    lengths = results[0]["completion_mask"].sum(dim=1).view(-1, G)
    rewards = torch.tensor(list(trainer._logs["rewards"]["shaped"])).view(-1, G)
    assert len(lengths.unique()) > 1
    expected = rewards - (lengths * rewards).sum(dim=1, keepdim=True) / lengths.sum(dim=1, keepdim=True)
    torch.testing.assert_close(results[0]["advantages"].view(-1, G), expected)


# The gradient of GRPO on groups of completions, each a list of the losses of its tokens.
OF_SUBSETS = {
    "grpo": lambda groups: torch.stack([loss.mean() for group in groups for loss in group]).mean(),
    "dapo": lambda groups: torch.cat([loss for group in groups for loss in group]).mean(),
    "dr_grpo": lambda groups: torch.stack([loss.sum() / 12 for group in groups for loss in group]).mean(),
    "prompt_mean": lambda groups: torch.stack([torch.cat(group).mean() for group in groups]).mean(),
}


@pytest.mark.parametrize(
    ("loss_type", "settings"),
    [
        ("grpo", {"max_tokens_per_micro_batch": 30}),
        ("grpo", {"pack_updates": False, "resample_groups": 1}),
        ("dapo", {"beta": 0.1}),
        ("dr_grpo", {"mask_truncated_completions": False, "gradient_accumulation_steps": 1}),
        ("prompt_mean", {}),
    ],
)
def test_an_update_is_that_of_the_completions_whose_rewards_vary_most(loss_type, settings, ours, small):
    """PODS, from the formula: the subset of the largest variance, and its own mean and deviation."""

    def apart(completions, **columns):
        return [float((i * i * 7 + 3) % 23) for i in range(len(completions))]

    settings = {"gradient_accumulation_steps": 2, "max_steps": 1, "logging_steps": 1, **settings}
    trainer = ours(apart, problems("mm" * 8), train_completions=3, loss_type=loss_type, advantage_eps=1e-9, **settings)
    trainer.grpo_math.grader.grade = grades
    before, now = weights(trainer.model), AutoModelForCausalLM.from_pretrained(small)
    with results_of(trainer, "_generate_and_score_completions") as results:
        trainer.train()
    rows, groups = results[0], []
    rewards = torch.tensor(list(trainer._logs["rewards"]["apart"]), dtype=torch.float64).view(-1, 4)
    for number, group in enumerate(rewards):
        chosen = list(max(combinations(range(4), 3), key=lambda one, of=group: of[list(one)].var().item()))
        kept = rows["completion_mask"][4 * number : 4 * number + 4].sum(dim=1)
        assert kept.nonzero().flatten().tolist() == chosen
        values = (group[chosen] - group[chosen].mean()) / group[chosen].std()
        torch.testing.assert_close(rows["advantages"][4 * number : 4 * number + 4][chosen].double(), values)
        groups.append([])
        for place, value in zip(chosen, values, strict=True):
            prompt, completion = (
                rows[f"{part}_ids"][4 * number + place][rows[f"{part}_mask"][4 * number + place] == 1].tolist()
                for part in ("prompt", "completion")
            )
            groups[-1].append(-value.float() * logps_of(now, prompt, completion))
    OF_SUBSETS[loss_type](groups).backward()
    step = torch.cat([(torch.zeros_like(p) if p.grad is None else -0.05 * p.grad).flatten() for p in now.parameters()])
    assert relative(weights(trainer.model) - before, step) < 1e-4
    line = trainer.state.log_history[0]
    assert line[metrics.ADVANTAGE_STD] == pytest.approx((2 / 3) ** 0.5, abs=1e-5)  # of the 3 trained ones


@pytest.mark.parametrize("packs", [True, False])
def test_the_share_of_clipped_completions_is_of_those_that_are_trained_on(packs, ours):
    def apart(completions, **columns):
        return [float((i * i * 7 + 3) % 23) for i in range(len(completions))]

    settings = {"importance_sampling_level": "sequence", "epsilon": 1e-6, "num_iterations": 2, "logging_steps": 1}
    trainer = ours(apart, train_completions=2, loss_type="grpo", max_steps=2, pack_updates=packs, **settings)
    trainer.train()
    # The first update moves each completion in the direction of its advantage.
    assert trainer.state.log_history[1]["clip_ratio/region_mean"] > 0.9


@pytest.mark.parametrize("masks", [False, True])
def test_a_stop_token_of_transformers_ends_a_completion_and_its_padding_is_not_trained_on(masks, ours, chars):
    stops = [token for token in range(42, 64) if token not in (49, 57)]  # these are end tokens of the model
    settings = {"generation_kwargs": {"eos_token_id": stops}, "mask_truncated_completions": masks, "max_steps": 1}
    trainer = ours(**settings, logging_steps=1)
    with results_of(trainer, "_generate_and_score_completions") as results:
        trainer.train()
    ids, lengths = results[0]["completion_ids"], results[0]["completion_mask"].sum(dim=1).tolist()
    kept = [row[:n].tolist() for row, n in zip(ids, lengths, strict=True) if n]
    assert not any(chars.pad_token_id in row for row in kept)
    ended = [row for row in kept if row[-1] in {*stops, *trainer.eos_token_ids}]
    assert any(row[-1] in stops for row in ended)
    line = trainer.state.log_history[0]
    assert line[metrics.TRUNCATED] == 1 - len(ended) / len(ids)
    assert line[metrics.ENDED_MAX] == max(map(len, ended))


def sampled_apart(chars, distance):
    """A ``rollout_func``. ``distance``: the sampler's log-probs of a completion minus the policy's, by its number."""

    def rollout(prompts, trainer):
        ids, completions = chars(prompts)["input_ids"], [[5 + i, 6, 7][: 1 + i % 3] for i in range(len(prompts))]
        with torch.no_grad():
            logps = [logps_of(trainer.model, *pair) for pair in zip(ids, completions, strict=True)]
        logprobs = [(logp + distance(i)[: len(logp)]).tolist() for i, logp in enumerate(logps)]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}

    return rollout


def corrects(trainer):
    trainer._last_loaded_step = 0
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True


def test_a_completion_far_from_the_sampler_on_average_has_no_weight_in_the_geometric_mask(ours, chars):
    # The sampler gave each token of every second completion 2% more.
    rollout = sampled_apart(chars, lambda i: torch.full((3,), 0.02 * (i % 2)))
    trainer = ours(rollout_func=rollout, vllm_importance_sampling_mode="geometric_mask", max_steps=1, logging_steps=1)
    corrects(trainer)
    with results_of(trainer, "_generate_and_score_completions") as results:
        trainer.train()
    assert results[0]["importance_sampling_ratio"].tolist() == [[1.0], [0.0]] * 4
    line = trainer.state.log_history[0]
    assert line[metrics.DROPPED_COMPLETIONS] == 0.5
    assert not {*metrics.TRL_WEIGHTS} & {*line}


def test_the_weights_of_trls_modes_are_trls_to_the_bit(ours, chars):
    noise = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    noise[5, 1] = torch.nan  # unknown to vLLM
    bounds = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 2.0}
    trainer = ours(rollout_func=sampled_apart(chars, lambda i: noise[i]), **bounds)
    corrects(trainer)
    trainer.model.train()
    for trainer.vllm_importance_sampling_mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        rows = trainer._generate_and_score_completions([{**row} for row in ROWS for _ in range(4)])
        logps = rows["old_per_token_logps"], rows["sampling_per_token_logps"]
        weights = sampler_weights(*logps, rows["completion_mask"], loss_settings(trainer, trainer.args))
        assert torch.equal(rows["importance_sampling_ratio"], weights)
        assert len(weights.unique()) > 2


def halved(kind):
    """A trainer that halves TRL's weights of tokens."""

    def _generate_and_score_completions(self, inputs):
        rows = super(trainer_class, self)._generate_and_score_completions(inputs)
        return {**rows, "importance_sampling_ratio": rows["importance_sampling_ratio"] / 2}

    trainer_class = type("Halved", (kind,), {"_generate_and_score_completions": _generate_and_score_completions})
    return trainer_class


def test_a_subclass_may_change_the_weights_that_correct_for_vllm(ours, chars):
    ends = []
    for name, halves in (("ours", True), ("trl", True), ("trl", False)):
        kind = KINDS[name]["trainer_class"]
        trainer = ours(
            rollout_func=sampled_apart(chars, lambda i: torch.full((3,), 0.1 * i)),
            max_steps=1,
            config_class=KINDS[name]["config_class"],
            trainer_class=halved(kind) if halves else kind,
        )
        corrects(trainer)
        before = weights(trainer.model)
        trainer.train()
        ends.append(weights(trainer.model) - before)
    assert relative(ends[0], ends[1]) < 1e-5
    assert relative(ends[2], ends[1]) > 0.5
