"""A LoRA that TRL's SFTTrainer has made, and that a recipe trains further (``adapter``)."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from small_trainers import letters
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from grpo_math.cli import main
from grpo_math.evaluation import from_run
from grpo_math.evaluation.ask import LoadedModels
from grpo_math.evaluation.engines import load_weights
from grpo_math.generation.models import load_tokenizer
from grpo_math.generation.request import Request
from grpo_math.problems.from_recipe import RecipeProblems
from grpo_math.report.card import model_card, trained_base
from grpo_math.report.run_dir import read_run
from grpo_math.run.checkpoints import checkpoints
from grpo_math.settings.recipe import read
from grpo_math.train import program

WEIGHTS = "adapter_model.safetensors"
CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False, "disable_tqdm": True}
# SGD, whose step is as long as the gradient: Adam would turn rounding into a full step.
TRAINING = {
    **CPU,
    "optim": "sgd",
    "learning_rate": 0.05,
    "max_steps": 4,
    "save_steps": 2,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "logging_steps": 1,
}
# Between two steps, and in the middle of a rollout.
TRAINING |= {"num_iterations": 2, "gradient_accumulation_steps": 1}


def sft(model, folder):
    """Fine-tune with LoRA as a TRL script does, and save the adapter."""
    rows = [{"prompt": f"{n} + 1?", "completion": f" {n + 1}"} for n in range(8)]
    settings = {**CPU, "max_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 2, "save_strategy": "no"}
    lora = LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "v_proj"], use_rslora=True)
    args = SFTConfig(str(folder), **settings, eos_token=load_tokenizer(model).eos_token)
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), peft_config=lora)
    trainer.train()
    trainer.save_model(str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def adapter(small, tmp_path_factory):
    return sft(small, tmp_path_factory.mktemp("start") / "sft")


def words(model, run_dir, **settings):
    settings = {"dataset": "generated:sums", "dataset_limit": 8, "rewards": "small_trainers:letters", **settings}
    settings |= {"model_name_or_path": model, "output_dir": run_dir}
    return [f"--{name}={value}" for name, value in {**TRAINING, **settings}.items()]


def of_stock_trl(model, adapter, rows, folder, **settings):
    """The adapter that TRL's own trainer makes of the same `PeftModel`."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    args = GRPOConfig(str(folder), **{**TRAINING, **settings})
    trainer = GRPOTrainer(policy, letters, args, Dataset.from_list(rows), processing_class=load_tokenizer(model))
    trainer.train()
    return get_peft_model_state_dict(trainer.model)


def vector(weights):
    return torch.cat([weights[name].flatten().float() for name in sorted(weights)])


def check_run(model, adapter, tmp_path, **settings):
    """Train, resume in the middle, and compare with TRL."""
    argv = words(model, tmp_path / "run", adapter=adapter, eval_n=0, **settings)
    assert program.main(argv) == 0
    run_dir = tmp_path / "run"
    rows = RecipeProblems(read(argv).settings).rows
    start, end = (load_file(folder / WEIGHTS) for folder in (Path(adapter), run_dir / "adapter"))
    stock = of_stock_trl(model, adapter, rows, tmp_path / "trl", **settings)
    way = vector(end) - vector(start)
    assert way.norm() > 0
    assert (vector(end) - vector(stock)).norm() < 1e-4 * way.norm()
    assert not [*run_dir.rglob("ref")]
    again = shutil.copytree(run_dir, tmp_path / "again")
    (last, _), *_ = checkpoints(again)
    for name in ("adapter", f"checkpoint-{last}"):
        shutil.rmtree(again / name)
    (again / "finished.json").unlink()
    assert program.main(words(model, again, adapter=adapter, eval_n=0, **settings)) == 0
    for file in (f"adapter/{WEIGHTS}", f"checkpoint-{last}/{WEIGHTS}"):
        assert (again / file).read_bytes() == (run_dir / file).read_bytes()


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_recipe_ends_with_the_weights_of_trl_and_resumes_bit_by_bit(beta, small, adapter, tmp_path):
    check_run(small, adapter, tmp_path, beta=beta)


@pytest.mark.full
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_so_does_one_of_real_weights(beta, smollm, tmp_path):
    less = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 4, "temperature": 3.0}
    check_run(smollm, sft(smollm, tmp_path / "sft"), tmp_path, beta=beta, **less)


def test_a_base_may_be_in_4_bit(tiny, bitsandbytes, tmp_path):
    model, run_dir = tiny("wide"), tmp_path / "run"
    start = sft(model, tmp_path / "sft")
    settings = {"load_in_4bit": True, "beta": 0.1, "eval_n": 0, "max_steps": 1, "save_strategy": "no"}
    assert program.main(words(model, run_dir, adapter=start, **settings)) == 0
    before, after = (load_file(folder / WEIGHTS) for folder in (Path(start), run_dir / "adapter"))
    assert 0 < (vector(after) - vector(before)).norm() < 0.1 * vector(before).norm()


@pytest.fixture(scope="module")
def finished(small, adapter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    settings = {"beta": 0.1, "eval_n": 2, "eval_split": "heldout", "max_steps": 1, "save_strategy": "no"}
    argv = words(small, folder, adapter=os.path.relpath(adapter), **settings)
    assert program.main(argv) == 0
    return folder, argv


def test_before_is_the_adapter_and_the_commands_know_it(finished, small, adapter, tmp_path):
    run_dir, _ = finished
    assert read_run(run_dir).config["adapter"] == adapter
    trained = str(run_dir / "adapter")
    files = {name: json.loads((run_dir / f"{name}.json").read_text()) for name in ("before", "after")}
    assert [files[name]["adapter"] for name in files] == [adapter, trained]
    assert from_run.read(str(run_dir)).models == {"base": (small, adapter), "trained": (small, trained)}
    request, models = Request(max_new_tokens=8), LoadedModels(str(run_dir)).models
    for name, folder in (("base", adapter), ("trained", trained)):
        expected = get_peft_model_state_dict(load_weights(small, folder, request))
        torch.testing.assert_close(get_peft_model_state_dict(models[name].weights), expected, rtol=0, atol=0)
    assert "from the adapter `sft`" in model_card(
        read_run(run_dir), "ada/sums", trained_base(read_run(run_dir)), "adapter"
    )
    assert main(["export", str(run_dir), "--merge", str(tmp_path / "merged")]) == 0
    # The first step has the reference of the start: the adapter.
    assert json.loads((run_dir / "history.jsonl").read_text().splitlines()[0])["kl"] == pytest.approx(0, abs=1e-6)


def test_a_run_of_another_adapter_is_not_resumed(finished, small, adapter, tmp_path, capfd):
    run_dir, argv = finished
    other = shutil.copytree(adapter, tmp_path / "other")
    (other / WEIGHTS).write_bytes((run_dir / "adapter" / WEIGHTS).read_bytes())
    assert program.main([*argv, f"--adapter={other}", "--max_steps=2", "--resume=force"]) == 2
    assert "checkpoints do not fit these settings (adapter: sha256:" in capfd.readouterr().err
