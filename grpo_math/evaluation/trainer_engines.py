"""The engines of a training: a trainer's model with the weights as they are now, sampled as in training.

An evaluation states its own seed, temperature and length with each request, so that it changes nothing that training
samples afterwards.

TRL's own trainer works too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from grpo_math.errors import ConfigError
from grpo_math.evaluation.engines import Backend, Model, with_server
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import Generate, batch_seed, read_off, stop_ids
from grpo_math.generation.models import context_length
from grpo_math.generation.request import Request
from grpo_math.generation.vllm_server import Server
from grpo_math.run.weights import split_by
from grpo_math.system.collectives import broadcast_from_main, gather_when_done
from grpo_math.system.http import ServerError
from grpo_math.system.replaced import replaced


# These inherit from `Model` rather than contain one, because an evaluation asks an engine for ten things, and these
# differ in three: who generates, which rank answers, and how long the context is. The other seven would be passed on.
class TrainerModel(Model):
    """The model of a trainer, sampled by transformers. Each rank answers its share of the rows."""

    tensor_parallel = 1  # processes that compute the same completions together

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.accelerator.unwrap_model(trainer.model), tokenizer=trainer.processing_class)
        self.accelerator = trainer.accelerator
        self.shows_progress = self.accelerator.is_main_process

    def gather_from_ranks(self, rows: Sequence[Any], call: Callable[[Sequence[Any], int], Any]) -> list[Any]:
        ranks = self.accelerator.process_index, self.accelerator.num_processes
        share, shares = (number // self.tensor_parallel for number in ranks)
        # With fewer rows than shares, some get the first row: a rank without rows would not take part in the
        # gathering, and the other ranks would wait.
        return gather_when_done(lambda: call(rows[share::shares] or rows[:1], share))


class TrainerVLLM(TrainerModel):
    """The model of a trainer, sampled by the vLLM of the run: one server, or an engine in each process."""

    # vLLM schedules requests itself, and a batch ends with its longest completion: small batches leave the GPU idle.
    min_batch_size = 512

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.backend = Backend("vllm")
        self.generation = trainer.vllm_generation
        # As in training: the engine may have a shorter context than the model.
        self.context = context_length(self.weights.config, self.generation)

    def gather_from_ranks(self, rows: Sequence[Any], call: Callable[[Sequence[Any], int], Any]) -> list[Any]:
        if self.generation.mode == "server":
            try:
                return [broadcast_from_main(lambda: call(rows, 0))]
            except ServerError as error:
                from grpo_math.generation.lost_server import ServerUnavailable

                # As in a rollout: the trainer saves the step, and the run ends.
                raise ServerUnavailable(str(error)) from None
        self.tensor_parallel = self.generation.tensor_parallel_size
        return super().gather_from_ranks(rows, call)

    def generator(self, request: Request) -> Generate:
        stops = stop_ids(self.tokenizer, self.weights.generation_config, request)
        # TRL's own client, to which training sends whole weights: the server has the model under one name.
        if self.generation.mode == "server" and not hasattr(self.generation, "sampler"):
            client = Server(self.generation.vllm_client.base_url)
            return with_server(client, client.models()[0], self.tokenizer, stops, request)
        longest, settings = request.max_new_tokens, {**request.for_vllm(), "stop_token_ids": stops}

        def generate(prompts: list[list[int]], seed: int) -> list[Completion]:
            if self.generation.mode == "server":
                sample = self.generation.sampler.request(prompts, seed, longest, logprobs=False, extra=settings)
                answers = [completion.tokens for completion in sample()]
            else:
                answers = self._colocated(prompts, seed, longest, settings)
            return [read_off(self.tokenizer, tokens, stops, request.stop) for tokens in answers]

        return generate

    def _colocated(self, prompts: Any, seed: int, longest: int, settings: dict[str, Any]) -> list[list[int]]:
        from vllm import SamplingParams

        if structured := settings.get("structured_outputs"):
            from vllm.sampling_params import StructuredOutputsParams

            settings = {**settings, "structured_outputs": StructuredOutputsParams(**structured)}
        seeds = [batch_seed(seed, i) for i in range(len(prompts))]
        params = [SamplingParams(**settings, seed=seed, max_tokens=longest) for seed in seeds]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        # vLLM runs in this process, so it shares torch's generator with the training.
        with torch.random.fork_rng():
            outputs = self.generation.llm.generate(requests, sampling_params=params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def open_engine(trainer: Any) -> Iterator[TrainerModel]:
    """Open the program that samples in the training of ``trainer``, with the weights as they are now.

    All ranks call this. transformers samples for a trainer without vLLM.
    """
    vllm = trainer.vllm_generation if getattr(trainer, "use_vllm", False) else None
    if vllm is None:
        if split := split_by(trainer.accelerator):
            raise ConfigError(
                "trainer",
                type(trainer).__name__,
                f"has its weights split over the processes ({split}), and generation here needs all of them",
                "train with use_vllm, or evaluate the saved model with grpo-math evaluate",
            )
        yield TrainerModel(trainer)
        return
    sleeps = vllm.mode == "colocate" and vllm.enable_sleep_mode
    step = trainer.state.global_step
    # The sync below logs its time to the trainer, but is not a part of a training step.
    with replaced(trainer, _metrics={"train": defaultdict(list), "eval": defaultdict(list)}):
        try:
            # TRL syncs once a step, which may be before or after this. Level 2 of sleep discards the weights, so after
            # it vLLM has none until a sync, even at the same step.
            if trainer._last_loaded_step != step or (sleeps and vllm._llm_weights_sleeping):
                vllm.sync_weights()
                trainer._last_loaded_step = step
            if sleeps:
                vllm.llm.wake_up(tags=["kv_cache"])
            # vLLM's tensor-parallel group may hang if it starts during a collective of training (huggingface/trl#3671).
            trainer.accelerator.wait_for_everyone()
            yield TrainerVLLM(trainer)
        finally:
            if sleeps:
                # As TRL does after each rollout: the optimizer's step needs this memory.
                vllm.llm.sleep(level=2)
                vllm._llm_weights_sleeping = True
