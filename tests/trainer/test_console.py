"""What a step prints: at most 25 figures, completions at 80 columns, one bar of loaded weights."""

from __future__ import annotations

import re

from datasets import Dataset
from rich.cells import cell_len
from small_trainers import config

from grpo_math.run import metrics
from grpo_math.trainer import console
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer


def test_a_step_prints_at_most_25_figures_and_five_columns_of_its_completions(tiny, tokenizer, tmp_path, capsys):
    rows = [{"prompt": [{"role": "user", "content": f"What is {i} + 4?"}], "answer": str(i + 4)} for i in range(4)]
    extra = {"max_steps": 2, "per_device_train_batch_size": 4, "max_completion_length": 16, "beta": 0.1}
    shown = {"logging_steps": 1, "log_completions": True, "num_completions_to_print": 3}
    args = config(MathGRPOConfig, tmp_path, **extra, **shown)
    trainer = MathGRPOTrainer(
        str(tiny()), ["accuracy"], args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    printed = capsys.readouterr()
    assert printed.err.count("Loading weights") == 1, "the reference has been loaded, too"
    ours = [line for line in printed.out.splitlines() if "real_accelerator" not in line]  # DeepSpeed's
    assert [line for line in ours if cell_len(line) > console.COLUMNS] == []
    assert printed.out.count("progress ") == printed.out.count("prompt ") == 2
    figures = re.findall(r"[a-z_]+ -?[0-9.e-]+(?:,|$)", printed.out, re.MULTILINE)
    assert 2 * 15 <= len(figures) <= 2 * 25
    assert "What is" in printed.out
    assert {"kl", "clip_ratio/low_min"} <= trainer.state.log_history[0].keys()


def test_every_figure_that_is_printed_is_one_of_the_log():
    names = [name for group in console.GROUPS.values() for name in group]
    assert len(set(names)) == len(names) <= 25
    assert set(names) <= metrics.METRICS.keys()


def test_text_of_a_model_is_no_markup(capsys):
    logs = {"prompt": ["a"], "completion": ["[bold]7[/bold] [/x]"], "advantages": [0.5], "rewards": {}, "extra": {}}
    console.print_completions(logs, 3, None)
    assert "[bold]7[/bold] [/x]" in capsys.readouterr().out
