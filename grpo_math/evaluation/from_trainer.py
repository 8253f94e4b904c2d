"""`evaluate` for scripts: a trainer or a model, on any rows with a prompt and a gold answer.

A trainer is evaluated by the program that samples in its training: the run's vLLM, or transformers. An evaluation
states its own seed, temperature and length with each request, so that it changes nothing that training samples
afterwards.

TRL's own trainer works too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from grpo_math.errors import ConfigError
from grpo_math.evaluation import results
from grpo_math.evaluation.backends import Backend, Model, quantisation_fields, with_server
from grpo_math.evaluation.fingerprint import Row, problems_hash, prompt_hash
from grpo_math.evaluation.results import Output
from grpo_math.evaluation.suite import Sampling
from grpo_math.evaluation.summary import Results, summary
from grpo_math.evaluation.toolbox import Toolbox, toolbox, trainer_toolbox
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import Generate, batch_seed, read_off, stop_ids
from grpo_math.generation.models import context_length
from grpo_math.generation.request import Request, request_from
from grpo_math.generation.vllm_server import Server
from grpo_math.rewards.inputs import GOLDS, completion_text, read_gold_answer
from grpo_math.run.files import write_json
from grpo_math.run.weights import split_by
from grpo_math.system.collectives import broadcast_from_main
from grpo_math.system.http import ServerError
from grpo_math.system.replaced import replaced


def evaluate(
    model: Any,
    problems: Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    adapter: str | None = None,
    backend: str = "hf",
    server: str | None = None,
    output: str | Path | None = None,
    extra: Mapping[str, Any] | None = None,
    progress: bool = True,
    tools: Toolbox | Sequence[str] = (),
    grade_timeout: float | None = None,
    **sampling: Any,
) -> Results:
    """Return the results of a trainer or a model on ``problems``: a list of rows, or a `datasets.Dataset`.

    A row has a ``prompt``, and its gold answer as ``answer`` or ``solution``; `load_problems` makes such rows.
    ``sampling`` are the fields of `Sampling` (samples, temperature, max_new_tokens, batch_size, seed), by default
    greedy.

    A model is a name with an ``adapter`` (`Backend` describes ``backend`` and ``server``), or a loaded model with its
    ``tokenizer``. ``output`` and ``extra`` are those of `Output`, and ``tools`` are the names of a recipe's ``tools``.

    A trainer is evaluated with its own model, tools and ``max_completion_length``, by the program that samples in
    training (vLLM with ``use_vllm``). Each call writes OUTPUT_DIR/before.json, or, after training, after.json, which
    `grpo-math report` compares. If training has several processes, each of them calls it.

    Raises `ConfigError` for rows without a prompt or a gold answer, and for weights that are split over processes and
    cannot be sampled by vLLM.
    """
    rows = evaluation_rows(problems)
    box = tools if isinstance(tools, Toolbox) else toolbox(tools)
    if not hasattr(model, "accelerator"):
        target = Output(output, extra or {}, progress=progress)
        with Model(model, adapter, Backend(backend, server), tokenizer) as opened:
            return results.evaluate(opened, rows, Sampling(**sampling), target, tools=box, grade_timeout=grade_timeout)
    trainer = model
    timeout = grade_timeout or getattr(
        getattr(getattr(trainer, "grpo_math", None), "settings", None), "grade_timeout", None
    )
    # The trainer's arguments and weights state what training asks.
    weights = trainer.accelerator.unwrap_model(trainer.model)
    request = request_from({**vars(trainer.args), **quantisation_fields(weights)})
    drawn = Sampling(**{"max_new_tokens": request.max_new_tokens, **sampling})
    # Without a path: every rank evaluates, and only the main process writes the file below.
    target = Output(extra=extra or {}, progress=progress)
    merged = over_ranks(
        trainer, rows, drawn, target, request, tools=box or trainer_toolbox(trainer), grade_timeout=timeout
    )
    name = "after.json" if trainer.state.global_step else "before.json"
    if trainer.accelerator.is_main_process:
        file = Path(str(trainer.args.output_dir)) / name
        # `RunFiles` of a script: the folder may contain the evaluation of an earlier run.
        for run_files in [one for one in trainer.callback_handler.callbacks if hasattr(one, "archive")]:
            run_files.archive([file])
            run_files.written.add(file)
        write_json(file, merged)
    return merged


def over_ranks(
    trainer: Any,
    rows: Sequence[Row],
    sampling: Sampling,
    output: Output,
    request: Request,
    *,
    tools: Toolbox | None = None,
    grade_timeout: float | None = None,
) -> Results:
    """Return the results of the rows of all ranks, by the program that samples in training. All ranks call this."""
    results.refuse_shared_ids(rows)  # a rank sees only its own
    output = replace(output, progress=output.progress and trainer.accelerator.is_main_process)
    with open_engine(trainer, tools) as model:
        sampling = replace(sampling, batch_size=max(sampling.batch_size, model.min_batch_size))

        def evaluate_share(local_rows: Sequence[Row], share: int) -> Results:
            # Batches are numbered on each rank. The first rank has the seeds of an evaluation by one process.
            seed = batch_seed(sampling.seed, -share) if share else sampling.seed
            drawn = replace(sampling, seed=seed)
            return results.evaluate(model, local_rows, drawn, output, request, tools=tools, grade_timeout=grade_timeout)

        parts = model.gather_from_ranks(rows, evaluate_share)
    # All processes of a tensor-parallel group return the same records, and with fewer rows than ranks several ranks
    # evaluate the first row: each counts once.
    all_ranks = {(str(record["id"]), record["sample"]): record for part in parts for record in part["rows"]}
    records = [all_ranks[str(row["id"]), sample] for row in rows for sample in range(sampling.samples)]
    # A rank has summed up and hashed its own rows only.
    totals = {
        **summary(records, sampling.samples),
        "problems_hash": problems_hash(rows),
        "prompt_hash": prompt_hash(rows, model.tokenizer),
    }
    return {**parts[0], **totals, "rows": records}


def evaluation_rows(problems: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows with all columns that an evaluation reads. Adds a missing id, problem or ``answer``.

    >>> evaluation_rows([{"prompt": [{"role": "user", "content": "1 + 1?"}], "solution": 2}])[0]["problem"]
    '1 + 1?'
    """
    rows = []
    for number, row in enumerate(problems):
        gold, prompt = read_gold_answer(row), row.get("prompt")
        if gold is None or not prompt:
            reason = f"has no {'gold answer' if prompt else 'prompt'}; its columns: {', '.join(row)}"
            remedy = f"give each row a prompt and {GOLDS}, as load_problems does"
            raise ConfigError("problems", f"row {number}", reason, remedy)
        known = {name: value for name, value in row.items() if value is not None}
        if not isinstance(known.get("problem"), str):
            known["problem"] = completion_text(prompt, "user")
        rows.append({"id": f"row/{number}", **known, "answer": gold})
    return rows


class Engine(Model):
    """The model of a trainer, sampled by the vLLM of the run: one server, or an engine in each process. `open_engine`
    opens it."""

    # vLLM schedules requests itself, and a batch ends with its longest completion: small batches leave the GPU idle.
    min_batch_size = 512

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.accelerator.unwrap_model(trainer.model), tokenizer=trainer.processing_class)
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
            client = Server(self.generation.vllm_client.base_url, timeout=3600.0)
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
def open_engine(trainer: Any, tools: Any = None) -> Iterator[Model]:
    """Open the program that samples in the training of ``trainer``, with the weights as they are now.

    All ranks call this. transformers samples for a trainer without vLLM. It also runs the turns of ``tools`` if vLLM is
    split over several processes, because the turns of these processes may differ.
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
            yield Engine(trainer)
        finally:
            if sleeps:
                # As TRL does after each rollout: the optimizer's step needs this memory.
                vllm.llm.sleep(level=2)
                vllm._llm_weights_sleeping = True
