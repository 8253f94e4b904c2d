"""The request of a recipe: each field that changes the prompt or the sampling is in training and in evaluations."""

import json
import shutil
from dataclasses import fields

import pytest
import yaml
from transformers import AutoTokenizer, GenerationConfig
from trl import GRPOConfig

from grpo_math.checks.check_model import show
from grpo_math.errors import ConfigError
from grpo_math.evaluation import from_run
from grpo_math.evaluation.evaluation import Evaluation, ResultsError
from grpo_math.evaluation.paired import SAME, compare
from grpo_math.evaluation.summary import Record, summarize
from grpo_math.generation.request import request_from
from grpo_math.report.card import model_card, trained_base
from grpo_math.report.run_dir import RunDir

# Field of a recipe -> a value, and the setting of the request that vLLM or transformers gets.
SAMPLING = {
    "temperature": (0.7, {"temperature": 0.7}),
    "top_p": (0.9, {"top_p": 0.9}),
    "top_k": (5, {"top_k": 5}),
    "min_p": (0.1, {"min_p": 0.1}),
    "repetition_penalty": (1.2, {"repetition_penalty": 1.2}),
    "vllm_structured_outputs_regex": ("[0-9]+", {"structured_outputs": {"regex": "[0-9]+"}}),
    "generation_kwargs": (
        {"stop": "</answer>", "stop_token_ids": [7], "presence_penalty": 0.5, "top_k": 3},
        {"stop": ["</answer>"], "stop_token_ids": [7], "presence_penalty": 0.5, "top_k": 3},
    ),
}
OTHER = {
    "chat_template_kwargs": ({"enable_thinking": False}, "template_kwargs", {"enable_thinking": False}),
    "prompt_template": ("boxed", "template", "boxed"),
    "system_prompt": ("Think.", "system_prompt", "Think."),
    "max_completion_length": (6, "max_new_tokens", 6),
    "cache_implementation": ("static", "cache_implementation", "static"),
    "model_init_kwargs": (
        {"rms_norm_eps": 0.1, "token": "hf_x", "trust_remote_code": False, "cache_dir": "x", "attention_dropout": 0.0},
        "model_init_kwargs",
        {"rms_norm_eps": 0.1},
    ),
}
# The part of GRPOConfig that configures prompts and sampling, and fields there that do neither.
NEITHER = {"num_generations", "num_generations_eval", "max_prompt_length", "use_transformers_continuous_batching"}
RECIPE = {"model_name_or_path": "base", "prompt_template": "gsm8k", "dataset": "x.jsonl", "temperature": 1.0}


@pytest.fixture
def read(tmp_path):
    """The request of `evaluate --run` and `ask` for a run of a recipe."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "adapter/adapter.safetensors").touch()

    def make(**settings):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({**RECIPE, **settings}))
        return from_run.read(str(tmp_path))

    return make


def refused(before, after):
    requests = [request.to_dict() for request in (before, after)]
    # An evaluation has some fields of the request once more, and `compare` names those.
    settings = [{**{name: one[name] for name in SAME if name in one}, "request": one} for one in requests]
    old, new = (Evaluation(one, summarize([Record("1")]), [Record("1")]) for one in settings)
    with pytest.raises(ResultsError, match=r"^[\w.]+ differs"):
        compare(old, new)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_field_is_in_both_requests(name, read):
    value, expected = SAMPLING[name]
    run = read(**{name: value})
    assert run.request == request_from({**RECIPE, name: value})
    assert run.request.for_vllm().items() >= expected.items()
    refused(request_from(RECIPE), run.request)
    if name not in ("vllm_structured_outputs_regex", "generation_kwargs"):
        assert run.request.for_transformers(vars(GenerationConfig())).items() >= expected.items()


@pytest.mark.parametrize("name", OTHER)
def test_another_field_is_in_both_requests(name, read):
    value, field, expected = OTHER[name]
    run = read(**{name: value})
    assert getattr(run.request, field) == getattr(request_from({**RECIPE, name: value}), field) == expected
    refused(request_from(RECIPE), run.request)


def test_quantisation_and_columns_are_those_of_the_run(read):
    run = read(
        load_in_4bit=True, bnb_4bit_quant_type="fp4", columns="problem=q", eval_dataset="y", eval_columns="answer=a"
    )
    assert (run.request.quantisation["load_in_4bit"], run.request.quantisation["bnb_4bit_quant_type"]) == (True, "fp4")
    assert request_from(RECIPE).quantisation == {}
    refused(request_from(RECIPE), run.request)
    assert [from_run.recipe_columns(run, data) for data in ("x.jsonl", "y", "z")] == ["problem=q", "answer=a", None]


def test_the_card_and_doctor_show_have_every_field(small, tmp_path):
    fields = {name: value for name, (value, *_) in {**SAMPLING, **OTHER}.items()}
    # The card is for vLLM and greedy. It has the template as the prompt, and the limit of the evaluation.
    shown = {name: value for _, settings in SAMPLING.values() for name, value in settings.items()}
    shown = {**shown, "temperature": 0, "chat_template_kwargs": fields["chat_template_kwargs"]}
    config = {**RECIPE, "model_name_or_path": small, "dataset": "generated:sums", **fields}
    run = RunDir(tmp_path, config, history=[], before=None, after=None)
    text = model_card(run, "ada/sums", trained_base(run), "model")
    body = json.loads(text.split("-d '")[1].split("'\n```")[0])
    assert body.items() >= shown.items()
    # A chat template of these tests has no such variable, and doctor refuses the argument.
    tokenizer = AutoTokenizer.from_pretrained(small)
    tokenizer.chat_template += "{# enable_thinking #}"
    tokenizer.save_pretrained(copy := shutil.copytree(small, tmp_path / "model"))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**config, "model_name_or_path": str(copy)}))
    answer = show(["--config", str(tmp_path / "recipe.yaml")], 1).json
    assert answer["request"] == request_from(config).to_dict()


def test_a_new_field_of_trl_for_sampling_is_noticed():
    named = [field.name for field in fields(GRPOConfig)]
    # TRL groups its fields by topic.
    first, last = named.index("temperature"), named.index("cache_implementation")
    assert {*named[first : last + 1]} <= {*SAMPLING, *OTHER} | NEITHER


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vllm_structured_outputs_regex": "[0-9]"}, "needs vLLM"),
        ({"generation_kwargs": {"presence_penalty": 1.0}}, "is a setting of vLLM"),
    ],
)
def test_a_setting_that_only_vllm_has_is_refused_by_transformers(settings, words):
    with pytest.raises(ConfigError, match=words):
        request_from(settings).for_transformers(vars(GenerationConfig()))
    names = {"stop_strings": "</a>", "min_new_tokens": 3}
    request = request_from({"generation_kwargs": names, "cache_implementation": "static"})
    known = request.for_transformers(vars(GenerationConfig()))
    assert (known["stop_strings"], known["min_new_tokens"], known["cache_implementation"]) == (["</a>"], 3, "static")
