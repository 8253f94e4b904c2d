"""The parts of the probe, and the probe on the embedded model: adapters that know the test, and that know others."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_math.cli import main
from grpo_math.evaluation.engines import Model
from grpo_math.evaluation.probe import SLACK, parts, write_probe
from grpo_math.evaluation.probe_results import PROBE, Probe, budget, read_probe
from grpo_math.evaluation.suite import Sampling
from grpo_math.generation.request import Request
from grpo_math.problems.generated import stories


def test_a_probe_samples_the_problems_and_continues_their_beginnings_greedily(small, script, tmp_path):
    script({"2 + 2?": ["#### 4", "#### 5"], "Ada has two": ["Apples, and eats one; then"]})
    rows = [{"id": "a", "problem": "2 + 2?", "prompt": "2 + 2?", "answer": "4", "answer_format": "gsm8k"}]
    text, end = "Ada has two", "apples and eats one."
    ends = {"memory": [{"id": "a", "problem": text, "prompt": text, "answer": end}], "control": []}
    sampling, request = Sampling(samples=2, temperature=0.5, max_new_tokens=12), Request(stop=["</answer>"], top_p=0.9)
    measured = parts(Model(small), rows, ends, sampling, request, tmp_path / "trained.json", progress=False)
    assert {name: Path(one.path).name for name, one in measured.items()} == {
        "samples": "trained.samples.json",
        "memory": "trained.memory.json",
    }
    samples, memory = measured["samples"], measured["memory"]
    assert (samples.summary.accuracy.value, samples.samples, samples.temperature) == (0.5, 2, 0.5)
    asked = samples.settings["request"]
    assert (asked["stop"], asked["top_p"]) == (["</answer>"], 0.9)
    assert (memory.summary.accuracy.value, memory.samples, memory.temperature) == (1.0, 1, 0.0)
    asked = memory.settings["request"]
    assert (asked["stop"], asked["top_p"]) == ([], 1.0), "filters are for answers"
    assert memory.settings["max_new_tokens"] == len(end) + SLACK  # of tokens that are bytes
    written = write_probe("sums", {"base": measured, "trained": measured})
    assert read_probe(tmp_path / PROBE) == written
    # Without a control.
    assert written == Probe("sums", samples.problems_hash, budget(samples, samples), memory=None)
    both = {"base": {**measured, "control": memory}, "trained": {**measured, "control": memory}}
    assert write_probe("sums", both).memory.control["trained"].n == 1


TEXTS = 2
STEPS = {"leaked": 20, "clean": 10}


@pytest.fixture(scope="module")
def runs(smollm, tmp_path_factory):
    """Two runs: fine-tuned on the texts of the test, and on other texts."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    folders = {}
    for name, seed in (("leaked", 7), ("clean", 8)):
        folders[name] = folder = tmp_path_factory.mktemp("runs") / name
        folder.mkdir()
        (folder / "config.yaml").write_text(
            f"model_name_or_path: {smollm}\nprompt_template: '{{problem}} Give the number after ####.'\n"
            "max_completion_length: 12\n"
        )
        texts = [row["problem"] for row in stories(TEXTS, seed=seed)]
        fine_tuned(smollm, tokenizer, texts, steps=STEPS[name]).save_pretrained(folder / "adapter")
    return folders


def fine_tuned(base, tokenizer, texts, steps):
    """Return an adapter after ``steps`` on all texts."""
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    rows = [torch.tensor([*tokenizer(text).input_ids, tokenizer.eos_token_id]) for text in texts]
    ids, labels = (pad_sequence(rows, batch_first=True, padding_value=pad) for pad in (tokenizer.eos_token_id, -100))
    for _ in range(steps):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def test_set(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [{"problem": row["problem"], "answer": "7"} for row in stories(TEXTS, seed=7)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def probed(run, *words, capsys):
    assert main(["evaluate", "--run", str(run), *words, "--probe", "--probe_samples", "2", "--json"]) == 0
    # DeepSpeed prints a line when it is imported.
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["evaluate", "--run", str(run), *words, "--probe", "--probe_samples", "2"]) == 0
    return answer["probe"], capsys.readouterr().out


@pytest.mark.full
def test_a_model_that_was_trained_on_the_test_is_found_out_and_the_base_and_a_clean_run_are_not(runs, test_set, capsys):
    found, text = probed(runs["leaked"], "--data", str(test_set), capsys=capsys)
    memory = found["memory"]
    assert memory["problems"]["trained"]["share"] == 1
    assert [memory[part][side]["share"] for part, side in (("problems", "base"), ("control", "trained"))] == [0, 0]
    assert memory["finding"].startswith("the trained model continues")
    assert "warning: the trained model continues" in text
    clean, text = probed(runs["clean"], "--data", str(test_set), capsys=capsys)
    assert (clean["memory"]["finding"], clean["memory"]["problems"]["trained"]["share"]) == (None, 0)
    assert "warning" not in text
