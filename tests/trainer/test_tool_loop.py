"""Tools in training: TRL's weights with scripted calls, what is masked, the figures, and ranks with uneven turns."""

import asyncio
import json
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import Mock

import launching
import pytest
from small_tools import python
from small_trainers import KINDS, letters, relative, weights
from small_vllm import SmallVLLM
from transformers import Gemma3Config

from grpo_math.errors import ConfigError
from grpo_math.generation.chat import prepare
from grpo_math.run import metrics
from grpo_math.trainer.tool_loop import ToolLoop, make_conversation

END = "<|im_end|>"


def block(code):
    return f"```python\n{code}\n```"


# What the first turns of eight completions say (None: what the model does), and what some say then.
FIRST = [
    *(block("3 + 4") + END, None, block("1 / 0") + END, block("1") + block("2") + END),
    *(block("'x ' * 200") + END, None, block("6 * 7") + END, block("slow") + END),
]
SECOND = {0: block("40 + 2") + END, 2: "#### 5" + END, 3: "####"}


ROWS = [{"prompt": [{"role": "user", "content": f"What is {n} + 4?"}], "answer": "42"} for n in range(8)]


def rewards(completions, **columns):
    return letters([" ".join(message["content"] for message in messages) for messages in completions])


def trained(ours, tokenizer, rewards=rewards, **settings):
    """A trained trainer with the calls of `FIRST` and `SECOND` in place of what it samples, and its prompts a turn."""
    settings = {"max_steps": 2, "max_completion_length": 240, "tools": [python], **settings}
    trainer, turns = ours(rewards, ROWS, tokenizer=tokenizer, **settings), []
    sampled = trainer._generate_single_turn

    def single_turn(prompts, *others, **settings):
        ids, logprobs = sampled(prompts, *others, **settings)
        turns.append(len(prompts))
        output = dict(enumerate(FIRST)) if len(prompts) == 8 else SECOND if turns[-2] == 8 else {}
        for row, text in output.items():
            ids[row] = ids[row] if text is None else tokenizer.encode(text, add_special_tokens=False)
        return ids, logprobs

    trainer._generate_single_turn = single_turn
    trainer.train()
    return trainer, turns


@pytest.mark.full(keep=["settings1"])
@pytest.mark.parametrize(
    ("settings", "calls"), [({"beta": 0.1, "num_iterations": 2}, 8), ({"max_tool_calling_iterations": 1}, 7)]
)
def test_scripted_calls_end_with_trls_weights(settings, calls, ours, chars):
    tokenizer = deepcopy(chars)  # TRL knows no calls of this model: it takes the template that ours gives the tokenizer
    (here, turns), (there, trls) = (trained(ours, tokenizer, **settings, **KINDS[kind]) for kind in ("ours", "trl"))
    before = weights(ours().model)
    assert turns == trls
    assert turns[1] == 5  # of six with calls, one result is too long
    assert relative(weights(there.model), before) > 1e-5
    assert relative(weights(here.model) - before, weights(there.model) - before) < 1e-5
    for name in ("tools/call_frequency", "tools/failure_frequency"):
        logged = [[line[name] for line in of.state.log_history if name in line] for of in (here, there)]
        assert logged[0] == logged[1]
        assert logged[0][0] > 0
    line = next(line for line in here.state.log_history if metrics.CALLED in line)
    # Six of eight call, some of them twice; one call takes too long.
    assert (line[metrics.CALLED], line[metrics.TIMEOUT_FREQUENCY]) == pytest.approx((6 / 8, 1 / calls))
    # The calls of "1" and "2" write their results. The result that is too long is in no message.
    assert line[metrics.ECHO_FREQUENCY] == pytest.approx(2 / (calls - 1))


def test_the_tokenizer_is_the_one_given_or_else_the_models(ours, chars, small):
    args, tokenizer = ours().args, deepcopy(chars)
    assert make_conversation("a/model", args, tokenizer, [python], None).tokenizer is tokenizer
    for model in (small, ours().model):
        assert make_conversation(model, args, None, [python], None).tokenizer.get_vocab() == chars.get_vocab()


@pytest.mark.parametrize(("use_vllm", "processes", "refused"), [(True, 1, False), (False, 2, False), (True, 2, True)])
def test_an_environment_has_trls_turns_but_for_several_processes_with_vllm(use_vllm, processes, refused):
    args = SimpleNamespace(use_vllm=use_vllm, world_size=processes)
    with pytest.raises(ConfigError, match="train on one GPU") if refused else nullcontext():
        assert make_conversation("a/model", args, None, [python], dict) is None


@pytest.mark.parametrize(
    ("processes", "settings", "waits", "context"),
    [
        (2, {"use_vllm": False}, False, 400),
        (1, {"use_vllm": True, "vllm_mode": "server"}, False, 300),
        (2, {"use_vllm": True, "vllm_mode": "server"}, True, 300),
        (2, {"use_vllm": True, "vllm_mode": "colocate"}, True, 200),
    ],
)
def test_ranks_wait_for_each_other_with_vllm_and_turns_end_with_the_shorter_context(
    processes, settings, waits, context
):
    engine = Mock(context=300, mode=settings.get("vllm_mode"))
    engine.llm.llm_engine.model_config.max_model_len = 200
    # A model with vision has the length in the config of its text model.
    model = SimpleNamespace(config=Gemma3Config(text_config={"max_position_embeddings": 400}))
    accelerator = SimpleNamespace(state=None, num_processes=processes)
    tools = ToolLoop(None, accelerator, model.config, engine if settings["use_vllm"] else None)
    assert (tools.waits, tools.context) == (waits, context)


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
    program = launching.ROOT / "tests/processes/turns.py"
    launching.run([*launching.TORCHRUN, str(program), tiny(), str(tmp_path), server.url], timeout=300)
    server.stop()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for question, output in first["heard"] + second["heard"]:
        n = int(question.split()[-1])
        assert output == ["", str(n)] * (n % 4) + [f"#### {n}"]
    # What each rank was told in its first step.
    assert sum(len(output) for _, output in first["heard"][:4]) != sum(len(output) for _, output in second["heard"][:4])
    assert first["turns"] == second["turns"]
    assert first["weights"] == second["weights"]
    calls = sum(len(output) // 2 for _, output in first["heard"] + second["heard"])
    assert sum(line["tools/call_frequency"] for line in first["told"]) == pytest.approx(calls / 8)


class Counting:
    """Counts calls under an asyncio lock, which belongs to the loop in which somebody waits for it first."""

    def __init__(self):
        self.lock, self.count = asyncio.Lock(), 0

    def reset(self, **row):
        self.count = 0

    async def python(self, code: str) -> str:
        """
        Calculate.

        Args:
            code: What to calculate.
        """
        await asyncio.gather(self._wait(), self._wait())
        self.count += 1
        return code

    async def get_reward(self):
        await asyncio.gather(self._wait(), self._wait())
        return float(self.count)

    async def _wait(self):
        async with self.lock:
            await asyncio.sleep(0)


def test_the_async_tools_and_reward_of_an_environment_share_a_loop(ours, chars):
    tokenizer = deepcopy(chars)
    prepare(tokenizer, [python])
    trainer, _ = trained(
        ours, tokenizer, rewards=None, tools=None, environment_factory=Counting, max_tool_calling_iterations=1
    )
    assert trainer.state.log_history[0]["reward"] == pytest.approx(7 / 8)
