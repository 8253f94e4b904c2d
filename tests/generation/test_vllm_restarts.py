"""The sync in whole trainings, against stand-ins for vLLM (small_vllm.py) that restart, stay away, or share work."""

import json

import pytest
from datasets import Dataset
from small_runs import ends, history, settings, start, two
from small_vllm import SETTINGS, SmallVLLM, letters, trainer_of
from trl.trainer import grpo_trainer

from grpo_math.errors import UserError
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer


@pytest.fixture
def small(tiny):
    small = SmallVLLM(tiny())
    yield small
    small.stop()


def test_a_server_that_restarts_gets_the_adapter_again_and_no_batch_is_lost(small, tiny, tokenizer, tmp_path):
    trainer = trainer_of(small.url, tiny, tokenizer, tmp_path, vllm_server_timeout=30.0)
    seen = []

    def restart_in_the_middle(path):
        if path == "/v1/completions":
            seen.append(len(small.adapters))
            if len(seen) == 6:  # the third rollout: two canaries before it, with three requests, and two rollouts
                small.before = lambda path: None
                small.stop()
                small.start()

    small.before = restart_in_the_middle
    trainer.train()
    assert trainer.state.global_step == 4
    assert len(seen) == 6
    assert trainer.vllm_generation.canary.agreed == 2
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == [1, 2, 3, 4]
    assert len(small.adapters) == 1  # that of the last sync: the older ones were unloaded
    folders = list(trainer.vllm_generation.root.iterdir())
    assert [folder.name for folder in folders] == list(small.adapters)
    for line in trainer.state.log_history:
        assert line.get("sampling/sampling_logp_difference/mean", 0.0) < 1e-3


@pytest.mark.full
def test_two_processes_whose_server_is_gone_for_good_save_and_end_with_one_line(small, tiny, tmp_path):
    """The training program, started as it is on a cluster; the server is lost in the third rollout."""
    asked = []

    def lose_it(path):
        asked.append(path)
        if asked.count("/v1/load_lora_adapter") == 3:
            small.before = lambda path: None
            small.stop()

    small.before = lose_it
    run_dir, log = tmp_path / "run", tmp_path / "log"
    server = ["--use_vllm=true", "--vllm_mode=server", f"--vllm_server_base_url={small.url}", "--vllm_server_timeout=2"]
    lora = ["--lora_r=4", "--lora_target_modules", "q_proj", "v_proj"]
    process = start([*two(tmp_path, "grpo_math.train.ranks"), *settings(tiny, run_dir, *server, *lora)], log)
    output = ends(process, log, 2)
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert f"no vLLM server answers at {small.url} after 2 seconds" in line
    assert "(checkpoint-2 is saved: the same command continues from it)" in line
    assert json.loads((run_dir / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2
    assert [line["step"] for line in history(run_dir)] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "lora", "message"),
    [
        ({"lora_config": None}, {}, "lora_r=4 cannot be served: .* takes no adapters: .*--enable-lora"),
        ({"lora_config": {"max_lora_rank": 2}}, {}, "takes adapters up to rank 2"),
        ({"model_config": {**SETTINGS["model_config"], "max_model_len": 6}}, {}, "max_completion_length=6 leaves no"),
        ({"version": "0.20.1"}, {}, "runs vLLM 0.20.1"),
        ({}, {"use_dora": True}, "use_dora=True cannot be synced"),
    ],
)
def test_what_the_server_cannot_do_is_said_before_the_first_step(settings, lora, message, tiny, tokenizer, tmp_path):
    small = SmallVLLM(tiny(), **settings)
    try:
        with pytest.raises(UserError, match=message):
            trainer_of(small.url, tiny, tokenizer, tmp_path, lora=lora)
    finally:
        small.stop()


def test_full_fine_tuning_and_merged_keep_trls_own_path(tiny, tokenizer, tmp_path, monkeypatch):
    made = []

    class Trls:
        def __init__(self, **kwargs):
            made.append(kwargs)
            raise RuntimeError("TRL's")

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Trls)
    with pytest.raises(RuntimeError, match="TRL's"):
        trainer_of("http://127.0.0.1:1", tiny, tokenizer, tmp_path, vllm_sync="merged")
    settings = {"use_cpu": True, "bf16": False, "use_vllm": True, "vllm_mode": "server", "report_to": "none"}
    with pytest.raises(RuntimeError, match="TRL's"):
        MathGRPOTrainer(
            model=tiny(),
            reward_funcs=letters,
            args=MathGRPOConfig(str(tmp_path), **settings),
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 8),
            processing_class=tokenizer,
        )
    assert len(made) == 2
