"""Turns that go on from what the ones before them computed: the tokens of plain `generate`, and fewer columns."""

import random

import pytest
import torch
from small_families import tiny_model
from small_generation import FAMILIES, PROMPTS, SAMPLED, counted, load

from grpo_math.generation.cache import TurnCache
from grpo_math.generation.decoding import lean_generation

TURN = 20


def sampled(model, prompts, earlier=None, shapes=None, lean=True, **settings):
    """The completions of token ids, sampled with a seed, to their end tokens."""
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {
        "input_ids": ids,
        "attention_mask": mask,
        "max_new_tokens": TURN,
        **SAMPLED,
        "temperature": 1.3,
        **settings,
    }
    torch.manual_seed(len(prompts))
    with counted(model) as results:
        if lean:
            with lean_generation(model, earlier):
                tokens = model.generate(**settings)
        else:
            tokens = model.generate(**settings)
    if shapes is not None:
        shapes += results
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [
        output[: next((t + 1 for t, token in enumerate(output) if token in ends), None)]
        for output in tokens[:, width:].tolist()
    ]


def first_turn(tokenizer, group=3):
    return [ids for prompt in PROMPTS for ids in [tokenizer.encode(prompt)] * group]


def ending(model, tokens=8000):
    """End tokens by the thousand, so that turns of a random model are of all lengths."""
    model.generation_config.eos_token_id = list(range(tokens))
    return model


def played(model, prompts, turns=3, goes_on=lambda prompt, output: sum(output) % 3 > 0, **ways):
    """Completions of every turn; the rows of `goes_on` get a result of their own length, some a long one."""
    output, rng, earlier = [], random.Random(0), TurnCache(goes_on) if ways.get("lean", True) else None
    for _ in range(turns):
        output.append(sampled(model, prompts, earlier, **ways))
        prompts = [
            [*prompt, *turn, *(rng.randrange(9000, 40000) for _ in range(rng.choice((3, 4, 9, 30))))]
            for prompt, turn in zip(prompts, output[-1], strict=True)
            if goes_on(prompt, turn)
        ]
    assert prompts
    return output


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_has_the_tokens_of_plain_generate(family, tiny, tokenizer):
    model = ending(load(tiny(family)))
    ours, plain = [], []
    turns = played(model, first_turn(tokenizer), shapes=ours)
    assert turns == played(model, first_turn(tokenizer), shapes=plain, lean=False)
    assert len({len(output) for output in turns[0]}) > 3
    computed, before = ([columns for _, columns in shapes if columns > 1] for shapes in (ours, plain))
    assert max(computed[1:]) <= 31  # a result, and the last token before it
    assert min(before[1:]) > 31


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "qwen3_next"])
def test_windows_go_on_and_states_begin_anew(family, tokenizer):
    model = ending(tiny_model(family))
    ours, prompts = [], [prompt * 3 for prompt in first_turn(tokenizer)]
    turns = played(model, prompts, turns=2, shapes=ours, use_cache=True)
    assert turns == played(model, prompts, turns=2, lean=False, use_cache=True)
    columns = [columns for _, columns in ours if columns > 1]
    assert (columns[-1] > 31) == (family == "qwen3_next")


@pytest.mark.slow
def test_what_is_kept_serves_one_call_and_no_other_text(tiny, tokenizer):
    model, earlier = ending(load(tiny("llama"))), TurnCache(lambda prompt, output: len(output) < TURN)
    prompts = first_turn(tokenizer)
    output = sampled(model, prompts, earlier)
    longer = [len(turn) < TURN for turn in output]
    kept = {tuple(prompt + turn[:-1]) for prompt, turn, goes_on in zip(prompts, output, longer, strict=True) if goes_on}
    assert set(earlier.rows) == kept
    assert 0 < len(kept) < len(prompts)
    shapes = []
    other = [[*prompt[:-1], 7, *turn, 9, 9] for prompt, turn in zip(prompts, output, strict=True)]
    assert sampled(model, other, earlier, shapes) == sampled(model, other, lean=False)
    assert shapes[0][1] == max(map(len, other))
    assert not set(earlier.rows) & kept
