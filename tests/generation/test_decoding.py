"""Generation: the tokens, the shape and the random numbers of plain `generate`, with fewer rows computed."""

from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from small_generation import FAMILIES, PROMPTS, SAMPLED, counted, load
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import DynamicCache

from grpo_math.generation import cache, completions
from grpo_math.generation.cache import GrowingLayer
from grpo_math.generation.completion import Completion
from grpo_math.generation.decoding import lean_generation, sample


@pytest.fixture
def model(tiny):
    return load(tiny("llama"))


def grouped(tokenizer, prompts=PROMPTS, group=4):
    return tokenizer([p for p in prompts for _ in range(group)], return_tensors="pt", padding=True)


def both(model, inputs, **settings):
    """(tokens, state of the generator, shapes of the forward passes) of plain `generate`, and of ours."""
    settings = {"max_new_tokens": 24, **settings}
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    results = []
    for generation in (nothing, lean_generation):
        torch.manual_seed(0)
        made = {name: value() if isinstance(value, type) else value for name, value in settings.items()}
        with counted(base) as shapes, torch.no_grad(), generation(model):
            tokens = model.generate(**inputs, **made)
        results.append((getattr(tokens, "sequences", tokens), torch.get_rng_state(), shapes))
    return results


@contextmanager
def nothing(model):
    yield


def assert_same(plain, ours):
    assert plain[0].shape == ours[0].shape
    assert torch.equal(plain[0], ours[0])
    assert torch.equal(plain[1], ours[1]), "the generator stands elsewhere"


def lengths(tokens, width, ends):
    """How many tokens each row was computed for: up to its end token, or all."""
    is_end = torch.isin(tokens[:, width:], torch.tensor(ends))
    return [row.index(True) + 1 if True in row else len(row) for row in is_end.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {**SAMPLED, "temperature": 1.3}], ids=["greedy", "sampled"])
def test_tokens_and_generator_are_those_of_plain_generate(family, sampling, tiny, tokenizer):
    model = load(tiny(family))
    plain, ours = both(model, grouped(tokenizer), **sampling)
    assert_same(plain, ours)
    if sampling["do_sample"]:
        assert len(set(lengths(ours[0], grouped(tokenizer)["input_ids"].size(1), ends_of(model)))) > 2


def ends_of(model):
    return model.generation_config.eos_token_id


SETTINGS = {
    "no repeated bigrams": {"no_repeat_ngram_size": 2},
    "at least 20 tokens with the prompt": {"min_length": 20},
    "no end token": {"eos_token_id": -1},
    "tokens that must not come": {"suppress_tokens": list(range(3000))},
    "an end forced at the limit": {"forced_eos_token_id": 2},
    "several completions of a row": {"num_return_sequences": 2},
    "more tokens than the cache has room for": {"max_new_tokens": cache.ROOM + 20, "eos_token_id": list(range(60))},
    "all of it": {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "min_new_tokens": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_setting_gives_the_tokens_of_plain_generate(settings, model, tokenizer):
    plain, ours = both(model, grouped(tokenizer), **{**SAMPLED, **SETTINGS[settings]})
    assert_same(plain, ours)
    assert ours[2][0][0] == len(PROMPTS), "the prompts were not shared: this is the plain way"


BATCHES = {
    "one prompt": (PROMPTS[:1], 4),
    "one completion of each": (PROMPTS, 1),
    "one row": (PROMPTS[:1], 1),
    "no padding": (PROMPTS[:1] * 2, 3),
    "a prompt of one token": (["x"], 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
def test_small_batches(batch, model, tokenizer):
    assert_same(*both(model, grouped(tokenizer, *BATCHES[batch]), **SAMPLED))


def test_no_mask_is_a_mask_of_ones(model):
    assert_same(*both(model, {"input_ids": torch.randint(5, 4000, (2, 6)).repeat_interleave(3, 0)}, **SAMPLED))


BEGINNING = "Work it out, then give the number after ####. " * 10


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_what_all_prompts_begin_with_is_computed_once(family, tiny, tokenizer):
    model, prompts = load(tiny(family)), [BEGINNING + prompt for prompt in PROMPTS]
    inputs = grouped(tokenizer, prompts)
    plain, ours = both(model, inputs, **SAMPLED)
    assert_same(plain, ours)
    shared = len(tokenizer(BEGINNING)["input_ids"])
    (one, length), (rows, others) = ours[2][:2]
    assert (one, rows) == (1, len(prompts))
    assert abs(length - shared) <= 1
    assert length + others == inputs.input_ids.size(1)


@pytest.mark.parametrize("changed", ["a position", "a mask within"])
def test_a_beginning_is_common_only_with_its_mask_and_positions(changed, model, tokenizer):
    inputs = grouped(tokenizer, [BEGINNING + prompt for prompt in PROMPTS], group=1)
    if changed == "a position":
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        inputs["position_ids"][1] += 7
    else:
        inputs["attention_mask"][2, -30] = 0
    plain, ours = both(model, inputs, do_sample=False)
    assert_same(plain, ours)


@pytest.mark.slow
def test_a_row_is_computed_until_it_ends_and_no_further(model, tokenizer):
    inputs = grouped(tokenizer)
    plain, ours = both(model, inputs, **SAMPLED)
    width = inputs["input_ids"].size(1)
    # The first token comes from the prefill, and the last one of a row is sampled but never computed.
    steps = [length - 1 for length in lengths(ours[0], width, ends_of(model))]
    assert ours[2][0] == (len(PROMPTS), width)
    assert sum(rows for rows, _ in ours[2][1:]) == sum(steps)
    assert len(ours[2]) == len(plain[2]) == 1 + max(steps)
    assert sum(steps) < 0.7 * sum(rows for rows, _ in plain[2][1:])


@pytest.mark.slow
def test_a_lora_adapter(tiny, tokenizer):
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(load(tiny("llama")), config)
    plain, ours = both(model, grouped(tokenizer), **SAMPLED)
    assert_same(plain, ours)
    with model.disable_adapter():
        assert not torch.equal(ours[0], both(model, grouped(tokenizer), **SAMPLED)[1][0]), "the adapter changes nothing"
    assert ours[2][0][0] == len(PROMPTS)


class ByPosition(LogitsProcessor):
    """Mixes rows: a row's scores depend on its place in the batch."""

    def __call__(self, input_ids, scores):
        return scores + torch.arange(scores.size(0))[:, None] * (torch.arange(scores.size(1)) % 5)


def dropping(model):
    model.model.layers[0].self_attn.q_proj = torch.nn.Sequential(
        model.model.layers[0].self_attn.q_proj, torch.nn.Dropout(0.2)
    )
    model.train()


OTHER_WAYS = {
    "beams": {"num_beams": 2},
    "a static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "a cache of the caller's": {"past_key_values": DynamicCache},
    "scores returned": {"return_dict_in_generate": True, "output_scores": True},
    "a prefill in chunks": {"prefill_chunk_size": 4},
    "a processor that mixes rows": {"logits_processor": LogitsProcessorList([ByPosition()])},
    "a repetition penalty, which knows the padding of each row": {"repetition_penalty": 1.5},
    "a function of the row's number": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(10 + row))},
    "guidance, which runs the model itself": {"guidance_scale": 1.5},
    "processes in step": {"synced_gpus": False},
    "dropout": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_what_the_loop_does_not_know_is_left_to_transformers(way, model, tokenizer):
    if way == "dropout":
        dropping(model)
    plain, ours = both(model, grouped(tokenizer), **{**SAMPLED, "max_new_tokens": 6, **OTHER_WAYS[way]})
    assert_same(plain, ours)
    assert plain[2] == ours[2]


def test_a_prompt_learning_adapter_is_left_to_transformers(tiny, tokenizer):
    model = get_peft_model(load(tiny("llama")), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    plain = model.generate(**grouped(tokenizer), max_new_tokens=6, do_sample=False)
    with lean_generation(model):
        ours = model.generate(**grouped(tokenizer), max_new_tokens=6, do_sample=False)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [4, 1], [2]])
def test_sampling_some_rows_is_multinomial_of_all(rows):
    torch.manual_seed(3)
    scores = torch.randn(5, 49152) * 3
    scores[:, 1000:] = -torch.inf
    for seed in range(20):
        torch.manual_seed(seed)
        drawn = torch.multinomial(scores.softmax(dim=-1), 1)[:, 0]
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(sample(scores[rows], torch.tensor(rows), 5), drawn[rows])
        assert torch.equal(torch.get_rng_state(), state)


def test_logits_without_a_distribution_are_an_error_as_in_multinomial():
    scores = torch.zeros(3, 10)
    scores[1, 3], scores[2, 4] = torch.nan, torch.inf
    assert (sample(scores, torch.arange(3), 3) < 0).tolist() == [False, True, True]


def test_a_layer_that_grows_in_place_holds_what_a_concatenation_would():
    torch.manual_seed(0)
    keys, values = torch.randn(2, 4, 3, 5, 8)
    layer = GrowingLayer(keys.clone(), values.clone())
    for step in range(2 * cache.ROOM + 5):
        new = torch.randn(2, keys.size(0), 3, 1, 8)
        keys, values = torch.cat([keys, new[0]], dim=2), torch.cat([values, new[1]], dim=2)
        seen = layer.update(*new)
        assert torch.equal(seen[0], keys)
        assert torch.equal(seen[1], values)
        assert layer.get_seq_length() == keys.size(2)
        if step == 10:  # row 1 leaves, and the last one takes its place
            layer.move(torch.tensor([3]), torch.tensor([1]), 3)
            keys, values = keys[[0, 3, 2]], values[[0, 3, 2]]


def test_a_completion_ends_with_its_first_end_token_or_is_cut():
    class Numbers:
        def decode(self, ids, skip_special_tokens):
            return " ".join(map(str, ids))

    assert completions.read_off(Numbers(), [5, 2, 9, 2], [2, 3]) == Completion([5, 2], text="5 2")
    assert completions.read_off(Numbers(), [5, 6], [2, 3]) == Completion([5, 6], text="5 6", truncated=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_models_own_generation_config_sets_changes_no_evaluation(temperature, tiny, tokenizer):
    """Chat models come with sampling and a repetition penalty, which `generate` adds to a config without them."""
    model = load(tiny("llama"))
    tokens = []
    for settings in ({}, {"do_sample": True, "temperature": 0.3, "top_k": 2, "repetition_penalty": 5.0, "min_p": 0.9}):
        model.generation_config.update(**settings)
        generate = completions.with_model(model, tokenizer, temperature=temperature, max_new_tokens=12)
        tokens.append([completion.tokens for completion in generate([[5, 6, 7], [8, 9, 10]], 3)])
    assert tokens[0] == tokens[1]
