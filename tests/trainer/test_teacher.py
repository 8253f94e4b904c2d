"""A reference of another name: a teacher with the same tokenizer."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_generation import small_model
from small_trainers import logps_of, relative, save_small, weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from grpo_math.errors import ConfigError
from grpo_math.rewards.functions import no_reward
from grpo_math.trainer.teacher import check_teacher

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
CONSTANT = {"lr_scheduler_type": "constant", "logging_steps": 1}
DISTIL = {"beta": 1.0, "kl_estimator": "k1", "loss_type": "bnpo"}


@pytest.fixture(scope="module")
def teacher(small, tmp_path_factory):
    """Another model than the one that is trained, with more layers and rows in its embedding, as larger models have."""
    layers = AutoConfig.from_pretrained(small).num_hidden_layers + 1
    model = AutoModelForCausalLM.from_pretrained(small, num_hidden_layers=layers)
    for parameter in model.parameters():
        parameter.data.mul_(0.7)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    model.get_output_embeddings().weight.data[size:] = -5.0
    folder = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(small).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "peft_config", [pytest.param(None, id="full", marks=pytest.mark.slow), pytest.param(LORA, id="lora")]
)
def test_distillation_without_rewards_is_the_reverse_kl_to_the_teacher_and_resumes(
    peft_config, teacher, ours, small, tmp_path
):
    settings = {
        **DISTIL,
        "reference_model": teacher,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 2,
        **CONSTANT,
    }
    trainer = ours(no_reward, **settings, peft_config=peft_config)
    start, rows = AutoModelForCausalLM.from_pretrained(small), []
    with torch.random.fork_rng():
        start = get_peft_model(start, peft_config) if peft_config else start
    start.load_state_dict(trainer.model.state_dict())
    compute = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: rows.append(compute(inputs)) or rows[-1]
    before = weights(start)
    assert trainer.args.beta == trainer.beta == 1.0
    trainer.train()
    model = AutoModelForCausalLM.from_pretrained(teacher)
    start.train()
    losses, optimizer = [], torch.optim.SGD([p for p in start.parameters() if p.requires_grad], lr=0.05)
    for prompt, p_mask, completion, c_mask in zip(
        *(rows[0][name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")), strict=True
    ):
        pair = prompt[p_mask.bool()].tolist(), completion[c_mask.bool()].tolist()
        now = logps_of(start, *pair)
        losses.append((now - now.detach()).exp() * (now - logps_of(model, *pair).detach()))
    loss = torch.cat(losses).mean()
    loss.backward()
    optimizer.step()
    saved = ours(no_reward, **{**settings, "max_steps": 1}, peft_config=peft_config, folder="first")
    saved.train()
    assert float(saved.state.log_history[0]["loss"]) == pytest.approx(loss.item(), abs=1e-4)
    assert relative(weights(saved.model), weights(start)) < 1e-6
    assert relative(weights(saved.model), before) > 1e-6
    again = ours(no_reward, **settings, peft_config=peft_config, folder="again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert torch.equal(weights(again.model), weights(trainer.model))


@pytest.fixture
def no_weights(monkeypatch):
    """Fail if weights are loaded."""
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda *args, **kwargs: pytest.fail("weights were loaded"))


def test_another_tokenizer_is_one_line_before_weights_load(ours, tmp_path, no_weights):
    save_small(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"reference_model='{tmp_path}' has another tokenizer"):
        ours(**DISTIL, reference_model=str(tmp_path))


def test_a_teacher_without_the_policys_attention_is_refused_in_one_line(ours, small, tmp_path):
    vocab_size = AutoConfig.from_pretrained(small).vocab_size
    small_model("gpt_oss", vocab_size=vocab_size, pad_token_id=0).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(small).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"reference_model=.* has no weights that can be loaded .*attention"):
        ours(**DISTIL, reference_model=str(tmp_path), **CONSTANT)


def test_a_teacher_is_refused_where_each_process_has_a_part_of_the_weights():
    args = SimpleNamespace(reference_model="x", deepspeed_plugin=SimpleNamespace(zero_stage=3))
    with pytest.raises(ConfigError, match="reference_model='x' does not work with ZeRO-3: use ZeRO-2 or DDP"):
        check_teacher(args, "model", None)
