"""Tools in training: TRL's weights with scripted calls, what is masked, the figures, and ranks with uneven turns."""

import json
from copy import deepcopy

import launching
import pytest
from datasets import Dataset
from small_tools import python
from small_trainers import config, letters, relative, weights
from small_vllm import SmallVLLM
from trl import GRPOConfig, GRPOTrainer

from grpo_math import MathGRPOConfig, MathGRPOTrainer
from grpo_math.run import metrics

END = "<|im_end|>"


def block(code):
    return f"```python\n{code}\n```"


# What the first turns of eight completions say (None: what the model does), and what some say then.
FIRST = [
    *(block("3 + 4") + END, None, block("1 / 0") + END, block("1") + block("2") + END),
    *(block("'x ' * 200") + END, None, block("6 * 7") + END, block("slow") + END),
]
SECOND = {0: block("40 + 2") + END, 2: "#### 5" + END, 3: "####"}


def rewards(completions, **columns):
    return letters([" ".join(message["content"] for message in messages) for messages in completions])


def script(trainer, tokenizer, turns):
    """The trainer with the calls of `FIRST` and `SECOND` in place of what it samples there."""
    sampled = trainer._generate_single_turn

    def single_turn(prompts, *others, **settings):
        ids, logprobs = sampled(prompts, *others, **settings)
        turns.append(len(prompts))
        output = dict(enumerate(FIRST)) if len(prompts) == 8 else SECOND if turns[-2] == 8 else {}
        for row, text in output.items():
            if text is not None:
                ids[row] = tokenizer.encode(text, add_special_tokens=False)
        return ids, logprobs

    trainer._generate_single_turn = single_turn


def made(trainer_class, config_class, folder, tokenizer, tmp_path, **settings):
    settings = {"max_steps": 2, "max_completion_length": 240, **settings}
    prompts = [[{"role": "user", "content": f"What is {n} + 4?"}] for n in range(8)]
    rows = [{"prompt": prompt, "answer": "42"} for prompt in prompts]
    return trainer_class(
        model=folder,
        reward_funcs=rewards,
        args=config(config_class, tmp_path, **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[python],
    )


def trained(trainer_class, config_class, folder, tokenizer, tmp_path, **settings):
    tokenizer, turns = deepcopy(tokenizer), []
    if trainer_class is GRPOTrainer:  # TRL knows no calls of this model: it takes the template that ours gets
        made(MathGRPOTrainer, MathGRPOConfig, folder, tokenizer, tmp_path)
    trainer = made(trainer_class, config_class, folder, tokenizer, tmp_path, **settings)
    script(trainer, tokenizer, turns)
    before = weights(trainer.model)
    trainer.train()
    return trainer, before, weights(trainer.model), turns


@pytest.mark.full(keep=["settings1"])
@pytest.mark.parametrize(
    ("settings", "calls"), [({"beta": 0.1, "num_iterations": 2}, 8), ({"max_tool_calling_iterations": 1}, 7)]
)
def test_scripted_calls_end_with_trls_weights(settings, calls, small, chars, tmp_path):
    theirs, before, trl_weights, turns = trained(GRPOTrainer, GRPOConfig, small, chars, tmp_path, **settings)
    ours, _, here, extra = trained(
        MathGRPOTrainer, MathGRPOConfig, small, chars, tmp_path, advantage_eps=1e-4, **settings
    )
    assert extra == turns
    assert extra[1] == 5  # of six with calls, one result is too long
    assert relative(trl_weights, before) > 1e-5
    assert relative(here - before, trl_weights - before) < 1e-5
    for name in ("tools/call_frequency", "tools/failure_frequency"):
        logged = [[line[name] for line in of.state.log_history if name in line] for of in (ours, theirs)]
        assert logged[0] == logged[1]
        assert logged[0][0] > 0
    (line,) = [line for line in ours.state.log_history if metrics.CALLED in line][:1]
    # Six of eight call, some of them twice; one call takes too long.
    assert (line[metrics.CALLED], line[metrics.TIMEOUT_FREQUENCY]) == pytest.approx((6 / 8, 1 / calls))


class Calling(SmallVLLM):
    """A server whose model calls python n % 4 times for question n, each time with its number, and then says it."""

    def complete(self, body):
        if body["temperature"] == 0:  # the canary's
            return super().complete(body)
        choices = []
        for prompt in body["prompt"]:
            text = self.tokenizer.decode(prompt)
            n = int(text.rpartition("question ")[2][0])
            done = text.rpartition("question ")[2].count("<|im_start|>tool")
            output = self.tokenizer.encode(block(n) + END if done < n % 4 else f"#### {n}{END}")
            one = {"token_ids": output, "logprobs": {"token_logprobs": [-0.5] * len(output)}}
            choices += [{"index": len(choices) + i, **one} for i in range(body["n"])]
        return choices


@pytest.mark.full
def test_ranks_with_uneven_turns_get_their_own_answers_from_a_server(tiny, tokenizer, tmp_path):
    server = Calling(tiny())
    server.tokenizer = tokenizer
    program = str(launching.ROOT / "tests/processes/turns.py")
    launching.run([*launching.TORCHRUN, program, tiny(), str(tmp_path), server.url], timeout=300)
    server.stop()
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    uneven = 0
    for rank in ranks:
        for question, output in rank["heard"]:
            n = int(question.split()[-1])
            assert output == ["", str(n)] * (n % 4) + [f"#### {n}"]
    first, second = (rank["heard"] for rank in ranks)
    for step in range(2):
        rounds = [sum(len(output) // 2 for _, output in heard[4 * step : 4 * step + 4]) for heard in (first, second)]
        uneven += rounds[0] != rounds[1]
    assert uneven, "the ranks were even by chance: take another seed"
    assert ranks[0]["turns"] == ranks[1]["turns"]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    calls = sum(len(output) // 2 for rank in ranks for _, output in rank["heard"])
    assert sum(line["tools/call_frequency"] for line in ranks[0]["told"]) == pytest.approx(calls / 8)
