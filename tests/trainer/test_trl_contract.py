"""What this package relies on in TRL: a new TRL fails here, with the name of what moved."""

import inspect
import re
from dataclasses import dataclass, field, fields

import contract_table
import pytest
import torch
import transformers.trainer
from small_trainers import KINDS, letters
from trl import GRPOConfig, GRPOTrainer

import grpo_math.trainer.trainer
from grpo_math.algorithm import losses
from grpo_math.errors import UserError
from grpo_math.trainer import contract, loss_settings, updates
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

SCORING = [
    "self",
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
]


def parameters(method) -> list[str]:
    return list(inspect.signature(method).parameters)


@pytest.fixture
def untested(monkeypatch, tmp_path):
    """``untested({module: [(old, new), ...]})``: TRL 1.99 is installed, whose modules differ from those here in texts.

    A module that is not here has the first new text.
    """
    monkeypatch.setenv("GRPO_MATH_CACHE", str(tmp_path))
    real = contract.source_text

    def install(changes, version="1.99.0"):
        def changed(module):
            source = real(module)
            for old, new in changes.get(module, ()):
                assert old in source
                source = source.replace(old, new)
            return source

        monkeypatch.setattr(contract, "source_text", changed)
        monkeypatch.setattr(contract, "versions", lambda: {"trl": version})
        contract.untested.cache_clear()
        return contract.untested()

    yield install
    contract.untested.cache_clear()


@pytest.mark.parametrize("package", contract.stored())
def test_the_table_has_what_we_use_and_the_installed_version_is_as_the_table_says(package):
    """If it fails and all other tests pass: `python tests/contract_table.py`."""
    tables, version = contract.stored()[package], contract.versions()[package]
    table = tables.get(version, [*tables.values()][-1])
    found = contract.compare(package, version, {version: table})
    assert (found.gone, found.changed, found.fields) == ([], [], [])
    used = contract.read(package, contract_table.use())
    assert {*used.needed} - {name for one in tables.values() for name in one.needed} == set()
    assert {*used.functions} <= {*table.functions}


GRPO, UTILS, CONFIG = "trl.trainer.grpo_trainer", "trl.trainer.utils", "trl.trainer.grpo_config"
LOSS = "            loss = (per_token_loss * mask).sum() / normalizer"
# A change of TRL -> the module, the text and the new text, and what the line says. None: nothing has changed.
CHANGES = {
    "comment": (GRPO, "        # ", "        # Indeed: ", None),
    "denominator": (GRPO, LOSS, LOSS + " / 2", "GRPOTrainer._compute_loss is changed, and grpo_math has its own"),
    "decorator": (
        GRPO,
        "@torch.no_grad()\n    def get_gamma",
        "def get_gamma",
        "get_gamma_weights is changed, and grpo",
    ),
    "method": (GRPO, "get_gamma_weights", "_gamma", "get_gamma_weights is gone or has moved, and grpo_math"),
    "copied helper": (UTILS, "def nanstd(", "def nanstd(d, ", "nanstd is changed, and grpo_math has its own"),
    "check of settings": (
        CONFIG,
        '{True: "group", False',
        '{True: "batch", False',
        "GRPOConfig.__post_init__ is changed",
    ),
    "metric": (GRPO, '"frac_reward_zero_std"', '"zero_std"', "the metric frac_reward_zero_std is gone"),
    "metric of a reward": (GRPO, 'f"rewards/{', 'f"reward/{', "the metric rewards/ is gone"),
    "new field": (CONFIG, "    beta: float", "    x: int = 0\n    beta: float", "GRPOConfig.x is new"),
    "default": (CONFIG, "default=0.6", "default=0.7", "GRPOConfig.ref_model_mixup_alpha is 0.7 by default"),
    "default of the base": (
        "trl.trainer.base_config",
        "default=10",
        "default=9",
        "GRPOConfig.logging_steps is 9 by default",
    ),
    "lost field": (CONFIG, "    beta: float", "    b: float", "GRPOConfig.beta is gone"),
}
OF_NO_FUNCTION = ("metric", "metric of a reward", "default", "default of the base", "lost field")
GONE = {
    "class": (UTILS, "class RepeatSampler(", "class Repeat(", "trl.trainer.utils.RepeatSampler is gone"),
    "import": (UTILS, "add_fused_lm_head", "fuse", "trl.trainer.utils.add_fused_lm_head is gone"),
    "overridden method": (GRPO, "_generate_single_turn", "_turn", "GRPOTrainer._generate_single_turn() is gone"),
    "argument": (GRPO, "completion_ids_list", "ids", "GRPOTrainer._calculate_rewards(completion_ids_list) is gone"),
    "constructor": (UTILS, "seed: int | None = None", "s: int | None = None", "RepeatSampler.__init__(seed) is gone"),
    "attribute": (GRPO, "self._buffered_inputs", "self._rows", "trainer._buffered_inputs is gone"),
}


def arguments(**settings):
    return GRPOConfig("x", use_cpu=True, bf16=False, **settings)


def pass_selftest(*names):
    contract.passed().parent.mkdir(exist_ok=True)
    contract.passed().write_text("\n".join(["beta", "bf16", "learning_rate", *names]))


@pytest.mark.parametrize("change", GONE)
def test_an_untested_trl_that_lacks_what_we_need_is_an_error_with_the_version_to_install(change, untested):
    module, *text, expected = GONE[change]
    assert untested({module: [text]}, version="1.16.0") == [], "a tested version is not read"
    untested({module: [text]}, version="1.16.1")
    with pytest.raises(UserError, match=f"^trl 1.16.1 was not tested: .*{re.escape(expected)}") as raised:
        contract.refuse()
    assert str(raised.value).endswith(': pip install "trl==1.16.0"')


@pytest.mark.parametrize("change", CHANGES)
def test_an_untested_trl_that_differs_is_one_warning_until_the_self_test_has_run_the_function(change, untested):
    module, *text, expected = CHANGES[change]
    [found] = untested({module: [text]})
    contract.refuse()
    if expected is None:
        assert found.line == "trl 1.99.0 was not tested: what grpo_math relies on is as in 1.16.0"
        assert [*contract.warnings(arguments())] == []
        return
    assert expected in found.line
    if change == "new field":
        assert [*contract.warnings(arguments())] == []
        return
    end = 'pip install "trl==1.16.0".'
    assert [*contract.warnings(arguments())] == [f"{found.line}. Run `grpo-math selftest`, or {end}"]
    pass_selftest()
    passed = "`grpo-math selftest` has passed and does not run this. To be safe:"
    assert [*contract.warnings(arguments())] == [f"{found.line}. {passed} {end}"]
    # Metrics and defaults are not run.
    pass_selftest(*contract.stored()["trl"]["1.16.0"].functions)
    assert bool([*contract.warnings(arguments())]) == (change in OF_NO_FUNCTION)


def test_a_setting_that_no_check_has_tried_with_a_trl_that_differs_is_named(untested):
    module, *text, _ = CHANGES["denominator"]
    untested({module: [text]})
    pass_selftest("GRPOTrainer._compute_loss")
    assert [*contract.warnings(arguments(beta=0.1, gradient_accumulation_steps=8))] == []
    line = "delta, loss_type: set here, and `grpo-math selftest` has not tried it with trl 1.99.0."
    assert [*contract.warnings(arguments(beta=0.1, loss_type="grpo", delta=2.0))] == [line]


def test_a_class_and_a_method_that_have_moved_are_found(untested):
    utils, trainer = contract.source_text(UTILS), contract.source_text(GRPO)
    sampler = utils[utils.index("class RepeatSampler") : utils.index("# torch.nanstd doesn't exist")]
    gamma = trainer[trainer.index("    @staticmethod\n    @torch.no_grad()") : trainer.index("    def _compute_loss(")]
    moved = {
        UTILS: [(sampler, "from .samplers import RepeatSampler\n\n\n")],
        "trl.trainer.samplers": [("", sampler)],
        GRPO: [(gamma, ""), ("class GRPOTrainer(", "from trl.trainer.gamma import Gamma\nclass GRPOTrainer(Gamma, ")],
        "trl.trainer.gamma": [("", f"class Gamma:\n{gamma}")],
    }
    [found] = untested(moved)
    assert (found.gone, found.changed) == ([], [])
    moved["trl.trainer.samplers"] = [("", sampler.replace("seed", "s"))]
    [found] = untested(moved)
    assert found.gone == ["RepeatSampler.__init__(seed)"]
    assert found.changed == ["RepeatSampler.__init__ is changed"]


@dataclass
class WithNewFields(GRPOConfig):
    """The next version of TRL's class, which has this name."""

    x: int = 0
    listed: list[int] = field(default_factory=list)
    filled: int | None = None

    def __post_init__(self):
        super().__post_init__()
        self.filled = self.filled or self.gradient_accumulation_steps


WithNewFields.__name__ = "GRPOConfig"


def test_a_new_field_that_a_script_sets_is_warned_about_after_the_self_test_too(untested):
    fields = "    x: int = 0\n    listed: list = field(default_factory=list)\n    filled: int | None = None\n"
    untested({CONFIG: [("    beta: float", f"{fields}    beta: float")]})
    pass_selftest()
    config = {"output_dir": "x", "use_cpu": True, "bf16": False, "gradient_accumulation_steps": 4}
    assert [*contract.warnings(WithNewFields(**config))] == []
    for values in ({"x": 1}, {"listed": [1]}, {"filled": 8}):
        line = f"{next(iter(values))}: new in trl 1.99.0, and not known to grpo_math's loss."
        assert [*contract.warnings(WithNewFields(**config, **values))] == [line]


@pytest.mark.parametrize("kind", [GRPOTrainer, MathGRPOTrainer])
def test_the_methods_that_users_and_trl_call_begin_alike(kind):
    assert parameters(kind._get_per_token_logps_and_entropies)[: len(SCORING)] == SCORING
    # All of them by name, for `help(MathGRPOTrainer)`.
    assert parameters(kind.__init__) == parameters(GRPOTrainer.__init__)


def test_the_default_of_advantage_eps_is_trls(ours):
    def small(completions, **columns):
        return [reward / 10_000 for reward in letters(completions)]

    trainer = ours(small, **KINDS["trl"])
    trainer._prepare_inputs([{"prompt": "3 + 4?"}] * 4 + [{"prompt": "Hello"}] * 4)
    rewards = torch.tensor(trainer._logs["rewards"]["small"]).view(2, 4)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + MathGRPOConfig.advantage_eps)
    assert list(trainer._logs["advantages"]) == pytest.approx(expected.flatten().tolist(), rel=1e-4)


# The fields of TRL's config, by what reads them. Our loss:
OF_OUR_LOSS = {
    *("beta", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "loss_type", "use_bias_correction_kl"),
    *("off_policy_mask_threshold", "top_entropy_quantile", "max_completion_length", "steps_per_generation"),
    *("sapo_temperature_pos", "sapo_temperature_neg", "use_vllm", "vllm_importance_sampling_correction"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    *("entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"),
    *("entropy_target", "router_aux_loss_coef"),
}
# Other code of TRL: its rollout, its constructor, its log.
TRL_ARGUMENTS = {
    *("cache_implementation", "cast_lm_head_to_fp32", "chat_template_kwargs", "disable_dropout", "generation_kwargs"),
    *("ds3_gather_for_generation", "generation_batch_size", "log_completions", "log_completions_hub_repo", "min_p"),
    *("log_multimodal", "log_unique_prompts", "mask_truncated_completions", "max_tool_calling_iterations"),
    *("model_init_kwargs", "multi_objective_aggregation", "num_completions_to_print", "num_generations"),
    *("num_generations_eval", "num_iterations", "pad_to_multiple_of", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    *("remove_unused_columns", "repetition_penalty", "reward_weights", "scale_rewards", "shuffle_dataset"),
    *("sync_ref_model", "temperature", "top_k", "top_p", "transformers_continuous_batching_config"),
    *("trust_remote_code", "use_transformers_continuous_batching", "vllm_enable_sleep_mode", "vllm_group_port"),
    *("vllm_gpu_memory_utilization", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    *("vllm_importance_sampling_mode", "vllm_max_model_length", "vllm_mode", "vllm_model_impl"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
    *("vllm_structured_outputs_regex", "vllm_tensor_parallel_size"),
}
# Old names, which the config turns into others.
OF_NOTHING = {"use_transformers_paged", "vllm_importance_sampling_cap"}


def test_every_field_of_trls_config_has_a_reader():
    of_transformers = {field.name for field in fields(transformers.TrainingArguments)}
    lists = (OF_OUR_LOSS, TRL_ARGUMENTS, OF_NOTHING)
    assert {field.name for field in fields(GRPOConfig)} - of_transformers == set().union(*lists) - of_transformers
    assert sum(map(len, lists)) == len(set().union(*lists))
    loss = inspect.getsource(GRPOTrainer._compute_loss)
    files = (grpo_math.trainer.trainer, updates, loss_settings, losses)
    source = "".join(map(inspect.getsource, files))
    assert {name for name in OF_OUR_LOSS if name not in source} == set()
    # A field of our loss alone that our loss does not read would be ignored in silence.
    read = {name for name in TRL_ARGUMENTS if re.search(rf"\b(?:self|args)\.{name}\b", loss)}
    assert read == set()


@pytest.mark.parametrize("module", [grpo_math, grpo_math.trainer])
def test_a_script_with_a_trl_that_lacks_a_name_ends_before_trl_is_imported(module, monkeypatch, untested):
    monkeypatch.delitem(vars(module), "MathGRPOTrainer", raising=False)
    module_of_trl, *text, _ = GONE["import"]
    untested({module_of_trl: [text]})
    with pytest.raises(UserError, match=r"add_fused_lm_head is gone.*: pip install"):
        _ = module.MathGRPOTrainer
