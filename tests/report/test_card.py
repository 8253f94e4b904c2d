"""The model card: what it says follows from the run, and its metadata is what the Hub takes."""

import json

import pytest
from hub_server import card_errors
from huggingface_hub import ModelCard
from synthetic_run import evaluation

from grpo_math.report.card import model_card, trained_base
from grpo_math.report.run_dir import RunDir

DETAILS = {"data": "gsm8k", "split": "test", "max_new_tokens": 300}


@pytest.fixture
def run(tmp_path):
    return RunDir(
        tmp_path,
        {
            "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
            "dataset": "gsm8k",
            "dataset_split": "train",
            "prompt_template": "gsm8k",
            "loss_type": "dapo",
            "learning_rate": 1e-6,
            "lora_r": 20,
            "num_processes": 2,
            "hardware": {"cpus": 8, "memory_gb": 64.0, "gpu": "NVIDIA H200", "gpus": 2, "gpu_memory_gb": 139.8},
            "versions": {"python": "3.11.7", "torch": "2.13.0", "grpo_math": "0.1.0", "trl": "1.16.0"},
            "command": "grpo_math.train --config r.yaml --hub_token ***",
        },
        history=[{"step": 1, "reward": 0.5}, {"step": 40, "reward": 0.75}],
        before=evaluation({0, 1}, 10, **DETAILS),
        after=evaluation({0, *range(2, 8)}, 10, **DETAILS),
    )


def card(run, kind="adapter", repo_id="ada/sums", **base) -> str:
    return model_card(run, repo_id, {**trained_base(run), **base}, kind)


def test_its_metadata_is_what_the_hub_takes_and_shows(run):
    text = card(run, card_data={"license": "apache-2.0"})
    assert card_errors(text) == []
    data = ModelCard(text).data
    assert (
        data.to_dict().items()
        >= {
            "base_model": "Qwen/Qwen2.5-1.5B-Instruct",
            "base_model_relation": "adapter",
            "library_name": "peft",
            "license": "apache-2.0",
            "datasets": ["openai/gsm8k"],
            "pipeline_tag": "text-generation",
        }.items()
    )
    (result,) = data.eval_results
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == ("openai/gsm8k", "main", "test")
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.7)
    assert result.metric_name == "accuracy of 10 problems"


def test_a_base_whose_card_is_broken_has_no_licence(run, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/README.md").write_text("---\nlicense: [\n---\n")
    run.config["model_name_or_path"] = str(tmp_path / "base")
    assert trained_base(run)["card_data"] == {}


def test_an_adapter_is_loaded_on_the_whole_model_that_sees(run, tmp_path):
    run.config["model_name_or_path"] = str(tmp_path)
    for name, auto_class in (("LlamaForCausalLM", "CausalLM"), ("Qwen3_5ForConditionalGeneration", "ImageTextToText")):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        assert f"\nbase = AutoModelFor{auto_class}.from_pretrained(" in card(run)
        assert "\nmodel = AutoModelForCausalLM.from_pretrained(" in card(run, "model")


@pytest.mark.parametrize(
    ("changes", "words", "absent"),
    [
        pytest.param(
            {},
            [  # 2 of 10 right before and 7 after: 6 gained, 1 lost
                "**20.0% before, 70.0% after: +50.0 points**, 95% paired interval ",
                ", n = 10.",
                "| accuracy | 20.0% | 70.0% | +50.0 points |",
                "10 problems: 6 went from wrong to correct, 1 back (McNemar: p = 0.12).",
                "With the prompt that it was trained on, the template `gsm8k`:",
                "max_new_tokens=300, do_sample=False",
                "| `learning_rate` | 1e-06 |",
                "| hardware | 2 x NVIDIA H200, 139.8 GB each; 2 processes |",
                "| software | python 3.11.7, torch 2.13.0, grpo_math 0.1.0, trl 1.16.0 |",
                "The licence of the base model is unknown.",
            ],
            ["grpo_math.train"],  # the command may name folders of this machine
            id="figures, recipe, hardware and versions",
        ),
        pytest.param(
            {"rewards": ["a | b\n\n# Owned"], "model_revision": "v1"},
            [
                "| `rewards` | a \\| b # Owned |",
                'revision="v1"',
                "vllm serve Qwen/Qwen2.5-1.5B-Instruct --revision v1 --enable-lora",
            ],
            [],
            id="a setting stays in its place, and the revision is asked for",
        ),
        pytest.param(
            {"model_name_or_path": "/models/private/mine", "dataset": "/data/secret project/mine.jsonl"},
            ["`mine`, a local folder", "`mine.jsonl`"],
            ["/models/private", "secret project", "\nbase_model:"],
            id="a folder of this machine is not named",
        ),
    ],
)
def test_what_a_card_says_and_does_not(changes, words, absent, run):
    run.config |= changes
    for side in (run.before, run.after):
        side.settings["data"] = run.config["dataset"]
    text = card(run)
    assert card_errors(text) == []
    assert [one for one in words if one not in text] == []
    assert [one for one in absent if one in text] == []


def test_without_an_evaluation_nothing_is_claimed(run):
    run.before = run.after = None
    text = card(run)
    assert "This run has no evaluation." in text
    assert ModelCard(text).data.eval_results is None
    run.after = evaluation({0, 1}, n=4)
    assert "**50.0% after training**, 95% interval 15.0% to 85.0%, n = 4." in card(run)


@pytest.mark.parametrize("template", ["gsm8k", "r1_zero"])
@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_how_to_load_it_is_python_that_compiles_and_a_rank_that_vllm_takes(kind, template, run):
    run.config |= {"load_in_4bit": kind == "adapter", "prompt_template": template}
    text = card(run, kind)
    compile(text.split("```python\n")[1].split("\n```")[0], "card", "exec")
    words = ("PeftModel", "BitsAndBytesConfig(load_in_4bit=True", "--max-lora-rank 32 --lora-modules sums=ada/sums")
    assert [word for word in words if word in text] == [*words] * (kind == "adapter")
