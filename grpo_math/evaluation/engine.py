"""The program that samples in training, as the `Model` of an evaluation: the run's vLLM, or transformers.

An evaluation states its own seed, temperature and length with each request, so that it changes nothing that training
samples afterwards.

Does not evaluate: results.py does.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from grpo_math.errors import ConfigError
from grpo_math.evaluation.backends import Backend, Model, Sampling, with_server
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import Generate, batch_seed, read_off, stop_ids
from grpo_math.generation.server import Server
from grpo_math.run.main_process import on_main
from grpo_math.run.weights import split_by


class Engine(Model):
    """The model of a trainer, sampled by the vLLM of the run: a server that the main process asks, or an engine in each
    process. `engine_of` opens it."""

    # vLLM schedules requests itself, and a batch ends with its longest completion: small batches leave the GPU idle.
    at_once = 512

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.accelerator.unwrap_model(trainer.model), tokenizer=trainer.processing_class)
        self.backend, self.generation = Backend("vllm"), trainer.vllm_generation

    def on_ranks(self, rows: Sequence[Any], call: Callable[[Sequence[Any]], Any]) -> list[Any]:
        if self.generation.mode == "server":
            return [on_main(lambda: call(rows))]
        self.together = self.generation.tensor_parallel_size
        return super().on_ranks(rows, call)

    def generator(self, sampling: Sampling) -> Generate:
        stops = stop_ids(self.tokenizer, self.weights.generation_config)
        # TRL's own client, to which training sends whole weights: the server has the model under one name.
        if self.generation.mode == "server" and not hasattr(self.generation, "sampling"):
            client = Server(self.generation.vllm_client.base_url, timeout=3600.0)
            return with_server(client, client.models()[0], self.tokenizer, stops, sampling)
        sample = self._with_adapter if self.generation.mode == "server" else self._colocated

        def generate(prompts: list[list[int]], seed: int) -> list[Completion]:
            return [read_off(self.tokenizer, tokens, stops) for tokens in sample(prompts, seed, sampling, stops)]

        return generate

    def _with_adapter(self, prompts: Any, seed: int, sampling: Sampling, stops: list[int]) -> list[list[int]]:
        sample = self.generation.sampling(
            prompts,
            seed,
            sampling.max_new_tokens,
            temperature=sampling.temperature,
            logprobs=False,
            extra={"stop_token_ids": stops},
        )
        return [completion.tokens for completion in sample()]

    def _colocated(self, prompts: Any, seed: int, sampling: Sampling, stops: list[int]) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                seed=batch_seed(seed, i),
                temperature=sampling.temperature,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=stops,
            )
            for i in range(len(prompts))
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        # vLLM runs in this process, so it shares torch's generator with the training.
        with torch.random.fork_rng():
            outputs = self.generation.llm.generate(asked, sampling_params=params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def engine_of(trainer: Any, tools: Any = None) -> Iterator[Model]:
    """Open the program that samples in the training of ``trainer``, with the weights as they are now, on every rank.

    transformers samples for a trainer without vLLM. It also plays the turns of ``tools`` if vLLM is split over several
    processes, because the turns of these processes may differ.
    """
    vllm = trainer.vllm_generation if getattr(trainer, "use_vllm", False) else None
    if vllm is None or (tools and vllm.mode == "colocate" and vllm.tensor_parallel_size > 1):
        if split := split_by(trainer.accelerator):
            reason = f"has its weights split over the processes ({split}), and generation here needs all of them"
            remedy = "train with use_vllm, or evaluate the saved model with grpo-math evaluate"
            raise ConfigError("trainer", type(trainer).__name__, reason, remedy)
        yield Model(trainer.accelerator.unwrap_model(trainer.model), tokenizer=trainer.processing_class)
        return
    sleeps = vllm.mode == "colocate" and vllm.enable_sleep_mode
    of_training, step = trainer._metrics, trainer.state.global_step
    # The sync below logs its time to the trainer, but is not a part of a training step.
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    try:
        # TRL syncs once a step, which may be before or after this. Level 2 of sleep discards the weights, so after it
        # vLLM has none until a sync, even at the same step.
        if trainer._last_loaded_step != step or (sleeps and vllm._llm_weights_sleeping):
            vllm.sync_weights()
            trainer._last_loaded_step = step
        if sleeps:
            vllm.llm.wake_up(tags=["kv_cache"])
        # vLLM's tensor-parallel group may hang if it starts during a collective of training (huggingface/trl#3671).
        trainer.accelerator.wait_for_everyone()
        yield Engine(trainer)
    finally:
        trainer._metrics = of_training
        if sleeps:
            # As TRL does after each rollout: the optimizer's step needs this memory.
            vllm.llm.sleep(level=2)
            vllm._llm_weights_sleeping = True
