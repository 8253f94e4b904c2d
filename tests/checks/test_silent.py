"""The failures without an error of docs/operations.md: each is provoked, and has the line that the page promises."""

import json
import re
from pathlib import Path

import pytest
from launching import ROOT

from grpo_math.checks.check_model import end_of_turn
from grpo_math.checks.check_rewards import rewards
from grpo_math.checks.diagnosis import diagnose
from grpo_math.checks.setup import Setup
from grpo_math.cli import main
from grpo_math.settings.recipe import read

PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
LIST = PAGE[PAGE.index("### Failures without an error") : PAGE.index("## Resume")]
ROWS = dict(re.findall(r"^- .+ \((\S+#\d+)\): (.+)$", LIST, re.MULTILINE))
THINKS = "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}<think>"
SWALLOWS = """
import threading
from math_verify import parse, verify

def graded(completions, answer, **columns):
    def grade(number):
        try:
            found[number] = float(verify(parse(answer[number]), parse(completions[number][-1]["content"])))
        except Exception:
            found[number] = 0.0
    found = {}
    threads = [threading.Thread(target=grade, args=(number,)) for number in range(len(completions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(completions))]
"""


def report(**figures) -> str:
    lines = [{"step": step, "reward": 0.1 * (step % 3), "grad_norm": 0.5, **figures} for step in range(1, 41)]
    return "\n".join(finding.line() for finding in diagnose(lines, {}))


def setup(*words: str) -> Setup:
    return Setup(read(["--dataset", "generated:sums", "--eval_n", "0", *words]))


def small_model(folder: Path, **config) -> str:
    """Write the tokenizer of a model that begins each answer with <think>."""
    from grpo_math.checks.tiny_model import character_tokenizer

    character_tokenizer(template=THINKS).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return str(folder)


def lost_grades(folder, capsys) -> str:
    (folder / "swallows.py").write_text(SWALLOWS)
    return "\n".join(finding.line() for finding in rewards(setup("--rewards", "swallows:graded")))


def another_end(folder, capsys) -> str:
    made = setup("--model_name_or_path", small_model(folder / "model", eos_token_id=7))
    return "\n".join(finding.line() for finding in end_of_turn(made))


def shown(folder, capsys) -> str:
    words = ["--config", "demo_cpu", "--prompt_template", "boxed"]
    main(["doctor", "--show", "1", *words, "--model_name_or_path", small_model(folder / "model")])
    return "".join(capsys.readouterr())


def sent(folder, capsys) -> str:
    (folder / "r.yaml").write_text("model_name_or_path: a/b\nuse_peft: true\nuse_vllm: true\nvllm_mode: server\n")
    main(["serve", "--check", "--config", "r.yaml"])
    return "".join(capsys.readouterr())


PROVOKED = {
    "huggingface/trl#5697": lambda *_: report(**{"completions/clipped_ratio": 0.9}),
    "modelscope/ms-swift#4570": lambda *_: report(frac_reward_zero_std=1.0, reward=0.0),
    "facebookresearch/DPR#99": lambda *_: report(learning_rate=0.0),
    "verl-project/verl#5635": lost_grades,
    "huggingface/trl#7039": another_end,
    "huggingface/trl#6966": shown,
    "huggingface/trl#6688": sent,
}


@pytest.mark.parametrize("reported", ROWS)
def test_a_failure_without_an_error_has_the_line_of_the_page(reported, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    quoted = re.findall("`([^`]+)`", ROWS[reported])
    if tests := [ROOT / name for name in quoted if name.startswith("tests/")]:
        assert all(test.is_file() for test in tests)
    else:
        assert quoted[-1] in PROVOKED[reported](tmp_path, capsys)


def test_ten_failures_are_named_with_public_reports():
    assert len(ROWS) == 10
    assert len({*ROWS} - {*PROVOKED}) == 3
