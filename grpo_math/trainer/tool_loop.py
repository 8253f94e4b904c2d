"""Tools in training: the trainer's tools become a `Conversation`, and `ToolLoop` replaces TRL's loop over turns.

If ranks generate together (vLLM, split weights), every rank has as many rows in a turn as the rank with the most,
because TRL's slice of a server's answers begins at ``process_index * len(prompts)``. Ranks with fewer rows repeat one
of their prompts, and its answers are dropped.

With images or an ``environment_factory``, TRL's own loop runs, on one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_math.errors import ConfigError
from grpo_math.generation.chat import Message
from grpo_math.generation.completion import Completion
from grpo_math.generation.models import context_length, tokenizer_or_own
from grpo_math.generation.turns import UNLIMITED, Conversation, Limits, run_tool_loop
from grpo_math.rewards.tools import echoed, tool_results
from grpo_math.run import metrics
from grpo_math.run.weights import split_by
from grpo_math.system.collectives import agree_on_largest


def make_conversation(model: Any, args: Any, tokenizer: Any, tools: Any, factory: Any) -> Conversation | None:
    """Return the `Conversation` of a trainer's ``tools``, or None if TRL's own loop over turns runs, if any.

    If no tokenizer is given, the model's is used, with a template that supports tool calls (`chat.prepare`).
    ``factory`` is the trainer's ``environment_factory``.
    """
    if factory and args.use_vllm and args.world_size > 1:
        raise ConfigError(
            "environment_factory",
            factory,
            "needs one process, or no vLLM: TRL mixes up the turns of several processes",
            "train on one GPU",
        )
    if factory or not tools:
        return None
    tokenizer = tokenizer_or_own(tokenizer, model)
    if hasattr(tokenizer, "image_processor"):
        return None
    return Conversation(tokenizer, tools, args.max_tool_calling_iterations, args.chat_template_kwargs)


class ToolLoop:
    """Runs the turns after the first of a trainer's completions, and computes the metrics of their calls."""

    def __init__(self, conversation: Conversation, accelerator: Any, config: Any, engine: Any = None) -> None:
        """``config``: of the model. ``engine``: TRL's `VLLMGeneration`, if vLLM samples."""
        self.conversation = conversation
        self.rows: list[Completion] = []  # of the last generation
        self.waits = accelerator.num_processes > 1 and bool(engine or split_by(accelerator))
        self.context = context_length(config, engine) or UNLIMITED

    def run(
        self,
        generate_turn: Callable[..., Any],
        length: int,
        turns: int | None,
        functions: list[dict[str, Any]],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        completions: list[list[Message]],
        logprobs: list[list[float]] | None,
        *images: Any,
    ) -> tuple[Any, ...]:
        """Do the work of TRL's ``_tool_call_loop``: its arguments after the prompts, and its results.

        ``generate_turn`` is TRL's ``_generate_single_turn``. ``length`` limits a completion's tokens, and ``turns`` its
        calls, if any limit does. ``functions`` has the tools of each row by name.
        """
        first = [
            replace(row, messages=messages)
            for row, messages in zip(_completions(completion_ids, logprobs), completions, strict=True)
        ]

        def generate(prompts: list[list[int]], widest: int) -> Any:
            # Ranks that generate together need equally many prompts. The answers to the added ones are dropped by
            # `run_tool_loop`.
            padded = prompts + [prompt_ids[0]] * (widest - len(prompts))
            # TRL sends each ``num_generations``-th prompt to a server. After the first turn the prompts of a group
            # differ.
            return _completions(*generate_turn(padded, None, {}, num_generations=1))

        limits = Limits(length, self.context, turns, self._agree_on_widest)
        rows = self.rows = run_tool_loop(self.conversation, prompt_ids, first, functions, generate, limits)
        return (
            [row.mask for row in rows],
            [row.messages for row in rows],
            [row.tokens for row in rows],
            None if logprobs is None else [row.logps or [] for row in rows],
            sum(row.calls for row in rows),
            sum(row.failures for row in rows),
            [[] for _ in rows],
        )

    def _agree_on_widest(self, open_rows: int) -> int:
        return agree_on_largest(open_rows) if self.waits else open_rows

    def gather_metrics(self, completions: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of all ranks' tool calls: timeouts, and results that the call contained already."""
        counts = [
            (row.calls, row.timeouts, len(tool_results(messages)), sum(echoed(messages)))
            for row, messages in zip(self.rows, completions, strict=True)
        ]
        calls, timeouts, results, echoes = torch.tensor(gather_object(counts), dtype=torch.float64).unbind(dim=1)
        return {
            metrics.TIMEOUT_FREQUENCY: (timeouts.sum() / calls.sum().clamp(min=1)).item(),
            metrics.ECHO_FREQUENCY: (echoes.sum() / results.sum().clamp(min=1)).item(),
            metrics.CALLED: (calls > 0).double().mean().item(),
        }


def _completions(ids: list[list[int]], logprobs: list[list[float]] | None) -> list[Completion]:
    row_logprobs: list[Any] = logprobs or [None] * len(ids)
    return [Completion(list(tokens), logps) for tokens, logps in zip(ids, row_logprobs, strict=True)]
