"""The output of a step at 80 columns, one bar of loaded weights, and the columns that explain a row of the table."""

import re
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
from rich.cells import cell_len
from small_runs import history, promised
from small_trainers import results_of
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback

from grpo_math.grading import Verdict
from grpo_math.run import metrics
from grpo_math.trainer import console
from grpo_math.trainer.meter import StepMeter


def test_a_script_prints_what_transformers_prints_and_five_columns_of_its_completions(ours, capsys):
    rows = [{"prompt": [{"role": "user", "content": f"What is {i} + 4?"}], "answer": str(i + 4)} for i in range(4)]
    completions = {"log_completions": True, "num_completions_to_print": 3}
    trainer = ours(
        "accuracy", rows, max_steps=2, per_device_train_batch_size=4, logging_steps=1, beta=0.1, **completions
    )
    printers = (PrinterCallback, ProgressCallback)
    assert [type(one) in printers for one in trainer.callback_handler.callbacks].count(True) == 1
    trainer.train()
    printed = capsys.readouterr()
    assert printed.err.count("Loading weights") == 1, "the reference has been loaded, too"
    assert len(re.findall(r"^\{'loss': .*'reward': ", printed.out, re.MULTILINE)) == 2
    table = [line for line in printed.out.splitlines() if line[:1] in "╭│╰" and line]
    assert [line for line in table if cell_len(line) > 80] == []
    assert printed.out.count("Prompt ") == 2
    assert "What is" in printed.out


# The command silences transformers, which turns its own bars off.
QUIET = SimpleNamespace(disable_tqdm=True)


def printer():
    """The printer of a recipe's trainer."""
    return console.Printer()


def test_the_bar_has_room_at_80_columns_and_an_evaluation_has_a_line_with_its_step(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress, at = printer(), SimpleNamespace(global_step=100, max_steps=1000, is_world_process_zero=True)  # resumed
    progress.on_train_begin(QUIET, at, None)
    at.global_step = 550
    progress.on_step_end(None, at, None)
    step = {"loss": 0.0, "accuracy": 0.5, "reward": 0.5, "completions/mean_length": 9.0}
    scored = {f"eval_sums_{name}": 0.5 for name in ("accuracy", "ci95_low", "ci95_high")} | {"eval_sums_n": 64}
    for logs in (step, scored, {"accuracy": 0.9}, None):
        progress.on_log(None, at, None, logs=logs)
    bar = progress.training_bar
    bar.start_t -= 3700
    line = tqdm.format_meter(**{**bar.format_dict, "ncols": 80})
    console.end_bar(SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[progress])))  # after an error
    assert bar.disable
    assert len(line) == 80
    assert "[1:01:40<1:01:40, accuracy=0.50, reward=0.50]" in line  # 450 steps in an hour, and 450 are left
    assert "step 550: sums: 50.0% of 64 problems are correct, 95% interval 50.0% to 50.0%" in capsys.readouterr().err


def test_a_line_without_a_terminal_as_in_a_notebook_has_the_loss_and_the_length_too(capsys, monkeypatch):
    # A log has no width, whatever another test has left in this process.
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: None)
    monkeypatch.setattr("grpo_math.run.bar.SECONDS", 0.0)
    progress, at = printer(), SimpleNamespace(global_step=0, max_steps=2, is_world_process_zero=True)
    progress.on_train_begin(QUIET, at, None)
    progress.on_log(None, at, None, {"loss": 0.1, "accuracy": 0.25, "reward": 0.5, "completions/mean_length": 90.0})
    at.global_step = 1
    progress.on_step_end(None, at, None)
    progress.on_train_end(None, at, None)
    assert "accuracy=0.25, reward=0.50, loss=0.10, mean_length=90.00" in capsys.readouterr().err


def test_the_first_completions_are_printed_in_a_table_in_which_text_of_a_model_is_no_markup(capsys):
    columns = {"reward": [1.0, 0.0, 0.0], "verdict": ["correct", None, "wrong"]}
    texts = {"prompt": ["3 + 4?", "3 + 4?", "x"], "completion": ["[bold]7[/bold] [/x]", "8", "9"]}
    for most in (2, 0):
        console.print_completions({**texts, "advantages": [0.5, -0.5, 0.0], "rewards": {}, "extra": columns}, 3, most)
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line[:1] == "│" and line.count("│") + line.count("┃") > 6
    ]
    assert [[cell.strip() for cell in re.split("[│┃]", line)[2:-2]] for line in lines] == [
        ["Prompt", "Completion", "reward", "Advantage", "verdict"],
        ["3 + 4?", "[bold]7[/bold] [/x]", "1.00", "0.50", "correct"],
        ["", "8", "0.00", "-0.50", ""],
    ]


ROWS = [
    {"id": f"sum-{i}", "prompt": f"What is {i} + 4?", "answer": str(i + 4), "answer_format": "gsm8k"} for i in (3, 5)
]


TABLES = {
    "max_steps": 2,
    "max_completion_length": 16,
    "logging_steps": 1,
    "log_completions": True,
    "num_completions_to_print": 0,
}
SPREAD = (metrics.REWARD_MIN, metrics.REWARD_MAX, metrics.ADVANTAGE_MEAN)


def logged(trainer):
    """The tables of a run of two steps, by step."""
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 2
    folder = Path(trainer.args.output_dir) / "completions"
    tables = [pandas.read_parquet(path) for path in sorted(folder.glob("*.parquet"))]
    for table, line in zip(tables, lines, strict=True):
        assert table["truncated"].mean() == float(line["completions/clipped_ratio"])
        spread = table["reward"].min(), table["reward"].max(), table["advantage"].mean()
        assert [float(line[name]) for name in SPREAD] == pytest.approx(spread, abs=1e-6)
    return tables


def test_each_completion_has_its_problem_gold_verdict_answer_reward_and_length(ours):
    def long(completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    golds = {row["prompt"]: (row["id"], row["answer"]) for row in ROWS}
    trainer = ours(["gsm8k", long], ROWS, reward_weights=[1.0, 0.5], baseline="none", **TABLES)
    for table in logged(trainer):
        assert {"step", "prompt", "completion", "advantage", "in_format"} <= set(table)
        assert list(zip(table["problem_id"], table["gold"], strict=True)) == [golds[p] for p in table["prompt"]]
        assert set(table["verdict"]) <= {"correct", "wrong", "no_answer", "unparseable"}
        assert table["tokens"].tolist() == table["long"].tolist()
        assert table["reward"].tolist() == (table["gsm8k"] + 0.5 * table["long"]).tolist()
    assert set(trainer.state.log_history[0]) == promised(
        {"rollout", "graded", "clip"}, ["gsm8k", "long"], map(str, Verdict)
    )


def test_rows_without_a_gold_answer_have_what_is_known_and_the_users_own_columns(ours):
    def length(completions, log_extra, **columns):
        log_extra("verdict", ["mine"] * len(completions))
        return [float(len(text)) for text in completions]

    for table in logged(ours(length, [{"prompt": row["prompt"]} for row in ROWS], **TABLES)):
        assert set(table["verdict"]) == {"mine"}  # a column of the user's own stays theirs
        assert not table[["gold", "extracted", "in_format"]].notna().any(axis=None)
        assert list(table["problem_id"]) == list(table["prompt"])  # without ids


def test_a_table_that_cannot_be_written_whole_leaves_no_file_and_ends_no_run(ours, tmp_path, monkeypatch):
    def cut(table, path):
        Path(path).write_bytes(b"PAR1")
        raise OSError("No space left on device")

    monkeypatch.setattr(pandas.DataFrame, "to_parquet", cut)
    trainer = ours("accuracy", ROWS, **TABLES)
    trainer.train()
    assert trainer.state.global_step == 2
    assert not [*(tmp_path / "completions").iterdir()]


def test_a_stop_string_ends_a_completion_as_eos_does(ours, chars):
    ended = chars("    7 </answer>\n")["input_ids"]  # at the limit, which is 16
    cut = (chars("again and")["input_ids"] * 16)[:16]
    # The last one ended with the model's context.
    kinds, trainer = [ended, cut, [*ended[:7], chars.eos_token_id], cut[:9]], ours("accuracy", ROWS, **TABLES)
    trainer._generate_single_turn = lambda prompts, *others, **more: ((kinds * len(prompts))[: len(prompts)], None)
    # vLLM's, which transformers' generate would refuse when the trainer is made.
    trainer.args.generation_kwargs = {"stop": ["</answer>"]}
    trainer.pad_to_multiple_of = 24
    trainer.mask_truncated_completions = True
    with results_of(trainer, "_generate_and_score_completions") as last:
        tables = logged(trainer)
        trained = last[0]
        trainer.evaluate(trainer.train_dataset)
    assert [table["truncated"].tolist() for table in tables] == [[False, True, False, True] * 2] * 2
    tokens = [16, 0, 8, 0] * 2
    for rows in (trained, last[0]):
        assert rows["completion_mask"].sum(dim=1).tolist() == tokens
        assert rows["num_items_in_batch"] == sum(tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "when"),
    [
        ({}, {"clip"}),
        ({"surrogate": "reinforce", "beta": 0.1, "num_iterations": 2}, {"clip", "kl"}),
        ({"loss_type": "sapo"}, set()),
        ({"pack_updates": False}, {"clip"}),
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "steps_per_generation": 4}, {"clip"}),
    ],
    ids=lambda value: ",".join(sorted(value)),
)
def test_a_line_holds_exactly_what_the_table_promises_and_its_phases_add_up(settings, when, ours, tmp_path):
    ours(max_steps=2, logging_steps=1, **settings).train()
    reused = "num_iterations" in settings or "steps_per_generation" in settings
    for i, line in enumerate(history(tmp_path)):
        fresh = not (reused and i)
        assert set(line) == promised(when | ({"rollout"} if fresh else set()), rewards=["letters"] if fresh else [])
        assert (line[metrics.SECONDS_GENERATE] > 0) == fresh
        seconds = [line[phase] for phase in (*metrics.PHASES, metrics.SECONDS_UPDATE) if phase in line]
        assert sum(seconds) == pytest.approx(line[metrics.SECONDS_STEP], abs=1e-9)
        assert min(seconds) >= 0


def test_a_metric_of_a_script_is_logged_in_place_of_ours_and_changes_no_other(ours):
    names = [*metrics.METRICS, "grading/correct", "my_metric"]
    # transformers writes these two in each line, in TRL's trainer, too.
    names = [name for name in names if name not in (metrics.STEP, metrics.EPOCH)]

    def mine(completions, log_metric, **columns):
        for name in logged:
            log_metric(name, 0.75)
        return [float(len(completion)) for completion in completions]

    lines = []
    rows = [{"prompt": "3 + 4?", "answer": "7", "answer_format": "direct"}] * 4
    for logged in (names, ["accuracy"]):
        trainer = ours(mine, rows, max_steps=1, logging_steps=1, beta=0.1, eval_dataset=rows, folder=str(len(logged)))
        trainer.train()
        lines.append(trainer.state.log_history[0])
        assert trainer.evaluate()["eval_accuracy"] == 0.75
    assert {name: lines[0][name] for name in names} == dict.fromkeys(names, 0.75)
    ours_too = [name for name, value in lines[1].items() if value == 0.75]
    assert ours_too == ["accuracy"]


def test_a_line_about_two_steps_has_the_means_of_their_phases_and_of_their_rollouts_tokens():
    log = {
        metrics.SECONDS_STEP: [4.0, 6.0],
        metrics.SECONDS_GENERATE: [1.0, 2.0],
        metrics.SECONDS_SYNC: [0.5],
        metrics.SECONDS_GRADE: [0.25, 0.25],
        metrics.SECONDS_SCORE: [1.0],
        metrics.SECONDS_SAMPLING: [1.0, 2.0],
    }
    meter = StepMeter(lambda: log, rollouts_per_step=0.5)
    meter.rollout_tokens += [30, 50]
    meter.write(vllm=True, cuda=False)
    assert 2**27 < log.pop(metrics.MEMORY_RESIDENT)[0] < 2**36
    assert log == {
        metrics.SECONDS_STEP: [4.0, 6.0],
        metrics.SECONDS_GENERATE: [1.5],
        metrics.SECONDS_SYNC: [0.25],
        metrics.SECONDS_GRADE: [0.25],
        metrics.SECONDS_SCORE: [0.5],
        metrics.SECONDS_UPDATE: [2.5],
        metrics.SECONDS_SAMPLING: [1.5],
        metrics.SYNC_SHARE: [0.05],
        metrics.TOKENS_PER_SECOND: [4.0],
    }
    log.clear()
    log[metrics.SECONDS_STEP] = [2.0]  # a step that uses the rollout again
    meter.write(vllm=False, cuda=True)
    assert (log[metrics.TOKENS_PER_SECOND], metrics.SECONDS_SYNC in log) == ([10.0], False)
    assert {metrics.MEMORY_ALLOCATED, metrics.MEMORY_RESERVED} < log.keys()


def test_training_warns_of_no_name_or_default_that_only_trl_or_transformers_could_change(ours, recwarn):
    trainer = ours(max_steps=1, gradient_checkpointing=True, use_cpu=False)
    recwarn.clear()
    trainer.train()
    messages = [str(warning.message) for warning in recwarn]
    assert [text for text in messages if "gradient_checkpointing" in text or "pin_memory" in text] == []
