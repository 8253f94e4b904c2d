"""Generation: the tokens, the shape and the random numbers of plain `generate`, with fewer rows computed."""

import copy
from contextlib import nullcontext
from inspect import signature
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model
from small_generation import BYTES, PROMPTS, counted, small_model
from small_model import END
from transformers import GenerationMixin, LlamaForCausalLM, LogitsProcessorList
from transformers.cache_utils import DynamicCache

from grpo_math.generation import cache, completions, decoding
from grpo_math.generation.completion import Completion
from grpo_math.generation.decoding import lean_generation
from grpo_math.generation.names import cache_name
from grpo_math.generation.request import Request
from grpo_math.run import speed_ups

SAMPLED = {"do_sample": True, "top_k": 0}
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
# Layers with keys and values, with a window of them, and with a state.
FAMILIES = {
    "llama": {},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


@pytest.fixture
def grouped(byte_ids):
    def batch(prompts=PROMPTS, group=4):
        return byte_ids([prompt for prompt in prompts for _ in range(group)], return_tensors="pt", padding=True)

    return batch


def both(model, inputs, **settings):
    """The shapes of the forward passes of plain `generate` and of ours, and the tokens, which are the same."""
    settings = {"max_new_tokens": 24, **settings}
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    results = []
    for generation in (nullcontext, lean_generation):
        torch.manual_seed(0)
        made = {name: value() if isinstance(value, type) else value for name, value in settings.items()}
        with counted(base) as shapes, torch.no_grad(), generation(model):
            tokens = model.generate(**inputs, **made)
        results.append((getattr(tokens, "sequences", tokens), torch.get_rng_state(), shapes))
    assert getattr(vars(model).get("generate"), "__module__", "") != lean_generation.__module__
    (plain, state, plain_shapes), (ours, our_state, our_shapes) = results
    assert torch.equal(plain, ours)
    assert torch.equal(state, our_state), "the generator is in another state"
    return plain_shapes, our_shapes, ours


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {**SAMPLED, "temperature": 1.3}], ids=["greedy", "sampled"])
def test_a_row_has_the_tokens_of_plain_generate_and_is_computed_until_it_ends(family, sampling, grouped):
    model, inputs = small_model(family, **FAMILIES[family]), grouped()
    plain, ours, tokens = both(model, inputs, **sampling)
    width = inputs["input_ids"].size(1)
    is_end = torch.isin(tokens[:, width:], torch.tensor(model.generation_config.eos_token_id))
    # The first token comes from the prefill, and the last one of a row is sampled but never computed.
    steps = [row.index(True) if True in row else len(row) - 1 for row in is_end.tolist()]
    assert ours[0] == (len(PROMPTS), width)
    assert sum(rows for rows, _ in ours[1:]) == sum(steps)
    assert len(ours) == len(plain) == 1 + max(steps)
    assert len(set(steps)) > 2 or not sampling["do_sample"]


SETTINGS = {
    "no repeated bigrams": {"no_repeat_ngram_size": 2},
    "at least 60 tokens with the prompt": {"min_length": 60},
    "no end token": {"eos_token_id": -1},
    "tokens that must not come": {"suppress_tokens": list(range(30))},
    "an end forced at the limit": {"forced_eos_token_id": 2},
    "several completions of a row": {"num_return_sequences": 2},
    "more tokens than the cache has room for": {"max_new_tokens": cache.SPARE_COLUMNS + 20, "eos_token_id": [3, 4]},
    "all of it": {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "min_new_tokens": 3},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_gives_the_tokens_of_plain_generate(settings, model, grouped):
    _, ours, _ = both(model, grouped(), **{**SAMPLED, **settings})
    assert ours[0][0] == len(PROMPTS), "the prompts were not shared: transformers generated"


# The prompts have 46 tokens, so that a row can have 106.
@pytest.mark.parametrize(("limit", "shares"), [(60, False), (106, False), (107, True)])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_stay_if_a_rope_may_read_the_longest_of_them(kind, limit, shares, grouped):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": limit, "short_factor": [1.0] * 4, "long_factor": [16.0] * 4}
    settings = {"max_position_embeddings": limit} if kind == "dynamic" else {}
    model = small_model("llama", rope_parameters=rope, **settings)
    _, ours, _ = both(model, grouped(), **SAMPLED, max_new_tokens=60)
    assert (ours[0][0] == len(PROMPTS)) == shares


@pytest.mark.parametrize(
    "batch",
    [(PROMPTS[:1], 4), (PROMPTS, 1), (PROMPTS[:1], 1), (PROMPTS[:1] * 2, 3), (["x"], 3)],
    ids=["one prompt", "one completion of each", "one row", "no padding", "a prompt of one token"],
)
def test_small_batches_with_and_without_a_mask(batch, model, grouped):
    inputs = grouped(*batch)
    both(model, inputs, **SAMPLED)
    both(model, {"input_ids": inputs["input_ids"]}, **SAMPLED)


BEGINNING = "Work it out, then give the number after ####. " * 2


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_what_all_prompts_begin_with_is_computed_once(family, grouped):
    model = small_model(family, **FAMILIES[family])
    inputs = grouped([BEGINNING + prompt for prompt in ("What is 3 + 4?", "Hello", "Who?", BEGINNING)])
    _, ours, _ = both(model, inputs, **SAMPLED)
    width = inputs["input_ids"].size(1)
    expected = [(4, width)] if family == "lfm2" else [(1, len(BEGINNING)), (4, width - len(BEGINNING))]
    assert ours[: len(expected)] == expected


@pytest.mark.parametrize(("beginning", "first"), [(86, (1, 86)), (85, (4, 87))])
def test_a_short_beginning_is_computed_with_each_prompt(beginning, first, model, grouped):
    """The prompts save three times their beginning: 258 tokens are worth a pass, and 255 are not."""
    inputs = grouped(["b" * beginning + end for end in ("de", "fg", "hi", "jk")], group=1)
    _, ours, _ = both(model, inputs, do_sample=False)
    assert ours[0] == first


def test_a_beginning_with_a_gap_in_its_mask_is_not_common(model, grouped):
    inputs = grouped([BEGINNING + prompt for prompt in PROMPTS], group=1)
    inputs["attention_mask"][2, 30] = 0
    _, ours, _ = both(model, inputs, do_sample=False)
    assert ours[0] == inputs["input_ids"].shape, "the part before the gap is too short"


DROPOUT = LoraConfig(lora_dropout=0.5, **LORA)


@pytest.mark.parametrize(
    ("config", "training", "by_transformers"),
    [
        (DROPOUT, False, False),
        (DROPOUT, True, True),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), False, True),
        (LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[40], **LORA), False, True),
        (VeraConfig(r=4, target_modules="all-linear", init_weights=False), False, False),
    ],
    ids=["lora", "dropout in training", "prompt learning", "alora", "vera"],
)
def test_an_adapter_generates_too_unless_it_drops_or_its_effect_depends_on_the_row(
    config, training, by_transformers, model, grouped
):
    plain, ours, _ = both(get_peft_model(model, config).train(training), grouped(), **SAMPLED)
    assert (ours == plain) == by_transformers


class OwnMethod(LlamaForCausalLM):
    def generate(self, input_ids=None, attention_mask=None, generation_config=None, **kwargs):
        assert "custom_generate" not in kwargs
        return super().generate(input_ids, generation_config, attention_mask=attention_mask, **kwargs)


class OwnLoop(LlamaForCausalLM):
    def _sample(self, input_ids, *args, **kwargs):
        return super()._sample(input_ids, *args, **kwargs)[:, : input_ids.size(1) + 2]


def on_the_object(model):
    plain = model.generate
    model.generate = lambda input_ids, attention_mask, **settings: plain(
        input_ids=input_ids, attention_mask=attention_mask, **settings
    )


@pytest.mark.parametrize("own", [OwnMethod, OwnLoop, on_the_object])
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "lora"])
def test_a_model_with_a_method_of_its_own_generates_by_it(own, wrapped, grouped):
    model = small_model()
    if isinstance(own, type):
        model.__class__ = own
    else:
        own(model)
    plain, ours, _ = both(get_peft_model(model, LoraConfig(**LORA)) if wrapped else model, grouped(), **SAMPLED)
    assert ours == plain
    if own is OwnLoop:
        assert len(plain) > 2


def by_position(input_ids, scores):
    """Mixes rows: a row's scores depend on its place in the batch."""
    return scores + torch.arange(scores.size(0))[:, None] * (torch.arange(scores.size(1)) % 5)


CACHE_NAME = cache_name(signature(GenerationMixin.prepare_inputs_for_generation).parameters)
OTHER_WAYS = {
    "beams": {"num_beams": 2},
    "a static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "a cache of the caller's": {CACHE_NAME: DynamicCache},
    "scores returned": {"return_dict_in_generate": True, "output_scores": True},
    "a prefill in chunks": {"prefill_chunk_size": 4},
    "a processor that mixes rows": {"logits_processor": LogitsProcessorList([by_position])},
    "a repetition penalty, which knows the padding of each row": {"repetition_penalty": 1.5},
    "a function of the row's number": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(10 + row))},
    "guidance, which runs the model itself": {"guidance_scale": 1.5},
    "processes in step": {"synced_gpus": False},
}


@pytest.mark.parametrize("settings", OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_what_the_loop_does_not_know_is_left_to_transformers_with_a_line(settings, model, grouped, caplog):
    speed_ups.forget()
    plain, ours, _ = both(model, grouped(), **{**SAMPLED, "max_new_tokens": 6, **settings})
    assert plain == ours
    assert caplog.text.count("Switched off: shared prefill: ") == 1


def test_an_argument_of_a_newer_transformers_is_named_with_the_version(model, grouped, monkeypatch, caplog):
    monkeypatch.setattr(decoding, "LOOP_ARGUMENTS", decoding.LOOP_ARGUMENTS - {"use_cache"})
    monkeypatch.setattr("transformers.__version__", "9.9.9")
    speed_ups.forget()
    plain, ours, _ = both(model, grouped(), **SAMPLED)
    assert plain == ours
    assert "transformers 9.9.9 passes use_cache to its loop" in caplog.text


def test_a_shared_prefix_that_a_state_excludes_is_named_and_a_short_one_is_not(grouped, monkeypatch, caplog):
    stateful = small_model("lfm2", **FAMILIES["lfm2"])
    for saved, lines in ((10**6, 0), (1, 1)):
        monkeypatch.setattr(cache, "MIN_SAVED_TOKENS", saved)
        speed_ups.forget()
        both(stateful, grouped(["same words, then A", "same words, then B"]), **SAMPLED)
        assert caplog.text.count("Switched off: shared prefix: ") == lines


def test_a_prompt_that_another_one_repeats_bounds_the_shared_prefix(model, grouped, monkeypatch):
    monkeypatch.setattr(cache, "MIN_SAVED_TOKENS", 1)
    _, ours, _ = both(model, grouped(["aaa", "aaaaaaa"]), **SAMPLED)
    assert ours[0] == (1, 2)  # and one of the shorter prompt's tokens for its first logits


def test_layers_on_two_devices_are_left_to_transformers(model, grouped):
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    plain, ours, _ = both(model, grouped(), **SAMPLED)
    assert plain == ours


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_without_a_distribution_are_an_error_as_in_multinomial(value, model, grouped):
    model.lm_head.weight.data[9] = value
    with lean_generation(model), pytest.raises(RuntimeError, match="inf or nan"):
        model.generate(**grouped(), **SAMPLED)


def test_prompts_are_the_ids_that_trl_trains_on(byte_ids):
    plain, chat = completions.token_ids(byte_ids, ["plain", [{"role": "user", "content": "chat"}]])
    assert byte_ids.decode(plain) == "plain"
    assert byte_ids.decode(chat).endswith(f"<|im_start|>user\nchat{END}\n<|im_start|>assistant\n")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_evaluation_depends_on_its_seed_and_on_no_generation_config_of_the_model(temperature, model, byte_ids):
    """Chat models come with sampling and a repetition penalty, which `generate` adds to a config without them."""
    made = []
    model.train()
    for settings in ({}, {"do_sample": True, "temperature": 0.3, "top_k": 2, "repetition_penalty": 5.0, "min_p": 0.9}):
        model.generation_config.update(**settings)
        generate = completions.with_model(model, byte_ids, Request(temperature=temperature, max_new_tokens=12))
        torch.manual_seed(len(made))
        state = torch.get_rng_state()
        made.append(generate([[5, 6, 7]] * 4, 3))
        assert torch.equal(torch.get_rng_state(), state)
    assert made[0] == made[1]
    assert model.training
    assert (generate([[5, 6, 7]] * 4, 4) == made[0]) == (temperature == 0)


@pytest.mark.parametrize("changes", [{"padding_side": "right"}, {"pad_token": None}])
def test_prompts_are_padded_on_the_left_with_any_tokenizer_of_a_script(changes, model, byte_ids):
    other = copy.deepcopy(byte_ids)
    for name, value in changes.items():
        setattr(other, name, value)
    prompts, request = [[5, 6, 7, 8, 9], [5], [9, 8]], Request(max_new_tokens=6)
    alone = [completions.with_model(model, byte_ids, request)([prompt], 0)[0].tokens for prompt in prompts]
    assert [made.tokens for made in completions.with_model(model, other, request)(prompts, 0)] == alone


def test_a_completion_ends_with_its_first_end_token_or_is_cut(byte_ids):
    assert completions.read_off(byte_ids, [32, 257, 9, 7], [7, 257]) == Completion([32, 257], text="A")
    assert completions.read_off(byte_ids, [32, 33], [7, 257]) == Completion([32, 33], text="AB", truncated=True)
    assert completions.read_off(byte_ids, [], [7], ["B"]) == Completion([], text="", truncated=True)


def test_a_stop_text_is_found_without_decoding_every_beginning(byte_ids, monkeypatch):
    decode = Mock(wraps=byte_ids.decode)
    monkeypatch.setattr(byte_ids, "decode", decode)
    for before in (0, 1, 5, 3998):
        ids = [32] * before + [33, 34] + [32, 33, 34] * ((3998 - before) // 3)
        assert completions.read_off(byte_ids, ids, [257], ["D", "BC"]).tokens == ids[: before + 2]
    assert completions.read_off(byte_ids, [32] * 4000, [257], ["B"]).truncated
    assert decode.call_count < 5 * 30


def test_a_stream_is_the_text_that_a_batch_gives_and_has_whole_characters(byte_ids):
    model, prompt, shown = small_model(), byte_ids("Hello")["input_ids"], []
    for request in (Request(max_new_tokens=12), Request(max_new_tokens=12, temperature=1.0)):
        (streamed,) = completions.with_model(model, byte_ids, request, shown.append)([prompt], 3)
        (batched,) = completions.with_model(model, byte_ids, request)([prompt], 3)
        assert (streamed, "".join(shown)) == (batched, batched.text)
        shown.clear()
    stream = completions.Stream(byte_ids, shown.append)
    text = "1 ≤ é 数!"
    for token in [0, *byte_ids(text)["input_ids"], BYTES + 1]:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(shown) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in shown)
