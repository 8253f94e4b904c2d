"""Shapes and settings -> bytes of each term on one GPU, while the policy is trained and while it generates. Pure.

A term is either counted (weights, adapter, gradients, optimizer state, KV cache; activations.py, to 5%) or an
allowance (`CONTEXT`, `COMMUNICATION`, `VLLM_OVERHEAD`, temporaries of the backward pass and of sampling). Terms are
added up although not all of them peak at the same moment: an upper bound. tests/planner holds both to what torch
allocates on a CPU; on a GPU nothing here has been measured.

Does not know fragmentation: plan.py keeps a margin for it.
"""

from typing import NamedTuple

from grpo_math.planner import activations, slack
from grpo_math.planner.activations import Precision, Work, packs, targets
from grpo_math.planner.model import Shape
from grpo_math.planner.settings import Settings, Zero
from grpo_math.run.machine import GB
from grpo_math.trainer.arrange import fill

CONTEXT = int(0.6 * GB)  # a CUDA context, its kernels, cuBLAS
COMMUNICATION = int(0.3 * GB)  # NCCL's buffers, with more than one process
VLLM_OVERHEAD = 1 * GB  # vLLM's own activations at 4096 tokens a step, and its CUDA graphs
VLLM_SERVER_SHARE = 0.9  # vLLM's default of gpu_memory_utilization
ROOM = 64  # tokens that decoding.py's cache has room for beyond those it holds
PROCESS = 2 * GB  # of main memory: Python, torch and transformers in one process

TERMS = {
    "base_weights": "base weights",
    "unquantised_weights": "weights that stay unquantised",
    "adapter": "adapter",
    "gradients": "gradients",
    "gradients_in_transit": "gradients on their way",
    "optimizer": "optimizer state",
    "communication": "gradient buckets, NCCL",
    "gathered_weights": "weights gathered by ZeRO-3",
    "activations": "activations",
    "recomputed": "a layer, recomputed",
    "layer_workspace": "temporaries of a layer",
    "lm_head_workspace": "fused LM head",
    "reference": "reference",
    "kv_cache": "KV cache",
    "sampling": "prefill and sampling",
    "allocator": "allocator's slack",
    "vllm_weights": "vLLM weights",
    "vllm_kv_cache": "vLLM KV cache",
    "vllm_overhead": "vLLM overhead",
    "cuda_context": "CUDA context",
}

# What comes and goes within an update, or a prefill.
TEMPORARY = ("gradients_in_transit", "recomputed", "layer_workspace", "lm_head_workspace", "sampling")


class Run(NamedTuple):
    """What memory needs to know of a run besides its settings: the GPUs of the policy and the batch."""

    processes: int
    rows: int  # per_device_train_batch_size, solved
    steps: int  # micro-batches of an optimizer step
    rollout: int  # completions generated at a time, by all processes
    prompt: int
    gpu_bytes: int
    generation: str  # transformers, colocate or server


def precision(settings: Settings, zero: Zero, deepspeed: Settings | None) -> Precision:
    """How TRL, peft and accelerate load this recipe.

    peft holds a LoRA's weights in float32 over a 16-bit base (autocast_adapter_dtype). TRL turns them to bfloat16 over
    a quantised base (arXiv 2305.14314, section 3) and leaves them as the base under ZeRO-3. DeepSpeed's 16-bit
    mode, which accelerate turns on where autocast would be, casts everything. ``auto`` is bfloat16 on a GPU; on a CPU
    it is counted as float32, which it may be.
    """
    cpu, quantised = settings["use_cpu"], settings["load_in_4bit"] or settings["load_in_8bit"]
    half = settings["dtype"] in ("bfloat16", "float16") or (settings["dtype"] == "auto" and not cpu)
    stream = 2 if half else 4
    autocast = bool(settings["fp16"] or (not cpu if settings["bf16"] is None else settings["bf16"]))
    said = [(deepspeed or {})[name].get("enabled") for name in ("bf16", "fp16") if name in (deepspeed or {})]
    if zero.active and (autocast if not said or "auto" in said else any(said)):
        return Precision(2, 2, 2, False)
    compute = 2 if autocast and not quantised else stream
    adapter = 2 if quantised else (stream if zero.stage == 3 else 4)
    return Precision(stream, compute, adapter, autocast)


# What is stored


def weights(shape: Shape, settings: Settings, stream: int) -> dict[str, int]:
    """Bytes of the base model.

    4 bit (bitsandbytes; arXiv 2305.14314): half a byte a weight in blocks of 64; a block's constant takes 4 bytes, or 1
    with double quantisation, whose own constants are 4 bytes for 256 blocks, an offset of 4 and a table of 256 floats;
    and the table of 16 floats of each matrix. 8 bit (arXiv 2208.07339): 1 byte a weight, 4 a row. Embeddings, LM head,
    norms and biases stay as they are.
    """
    parts, linears = shape.parameters(), shape.linears()
    other = sum(parts[name] for name in ("embedding", "norms", "head")) * stream
    if settings["cast_lm_head_to_fp32"]:  # a tied head is the embedding
        other += (4 - stream) * parts["embedding" if shape.tied else "head"]
    biases = shape.layers * sum(linear.n_out for linear in linears if linear.bias) * stream
    if settings["load_in_4bit"] or shape.prequantized:
        nested = settings["use_bnb_nested_quant"] or shape.prequantized
        matrices = shape.layers * sum(four_bit(linear.weights, nested) for linear in linears)
    elif settings["load_in_8bit"]:
        matrices = shape.layers * sum(linear.weights + 4 * linear.n_out for linear in linears)
    else:
        return {"base_weights": shape.layers * sum(linear.weights for linear in linears) * stream + biases + other}
    return {"base_weights": matrices, "unquantised_weights": biases + other}


def four_bit(n: int, nested: bool) -> int:
    """Bytes of ``n`` weights in bitsandbytes' 4 bit.

    >>> four_bit(64 * 256, nested=False), four_bit(64 * 256, nested=True)
    (9280, 9544)
    """
    blocks = -(-n // 64)
    constants = blocks + -(-blocks // 256) * 4 + 4 + 256 * 4 if nested else blocks * 4
    return -(-n // 2) + constants + 16 * 4


def trainable(shape: Shape, settings: Settings) -> list[tuple[int, int]]:
    """(parameters of a tensor, how many such tensors) of all that is trained.

    A LoRA of rank r (arXiv 2106.09685) has r x n_in and n_out x r; DoRA (arXiv 2402.09353) n_out more.
    """
    if settings["use_peft"]:
        r, adapted = settings["lora_r"], targets(shape, settings)
        sizes = [size for linear in adapted for size in (r * linear.n_in, r * linear.n_out)]
        sizes += [linear.n_out for linear in adapted if settings["use_dora"]]
        return [(size, shape.layers) for size in sizes]
    sizes = [linear.weights for linear in shape.linears()]
    sizes += [linear.n_out for linear in shape.linears() if linear.bias]
    tensors = [(shape.vocab * shape.hidden, 1 if shape.tied else 2), *((size, shape.layers) for size in sizes)]
    tensors.append((shape.hidden, shape.layers * shape.norms_per_layer + 1))
    return tensors + ([(shape.head_dim, 2 * shape.layers)] if shape.qk_norm else [])


def optimizer_bytes(tensors: list[tuple[int, int]], name: str, element: int) -> int:
    """Bytes of an optimizer's state for tensors whose elements have ``element`` bytes.

    AdamW (arXiv 1711.05101) keeps two moments in the dtype of the parameter, 8 bytes a float32 one, and torch a step
    of 4 bytes a tensor. bitsandbytes' 8-bit AdamW (arXiv 2110.02861) keeps 2 bytes, two constants of 4 for a block of
    256, and two tables of 256 floats in all; tensors below 4096 elements stay in 32 bit.

    >>> optimizer_bytes([(1024, 2), (4096, 1)], "adamw_torch", 4)
    49164
    >>> optimizer_bytes([(1024, 2), (4096, 1)], "adamw_8bit", 4)
    26752
    """
    if name == "sgd":
        return 0
    if "8bit" in name:
        small = sum(8 * n * count for n, count in tensors if n < 4096)
        large = sum((2 * n + 8 * -(-n // 256)) * count for n, count in tensors if n >= 4096)
        return small + large + (2 * 256 * 4 if large else 0)
    if name == "paged_adamw_32bit":
        return sum(8 * n * count for n, count in tensors)
    return sum((2 * element * n + 4) * count for n, count in tensors)


def paged_bytes(tensors: list[tuple[int, int]], name: str) -> int:
    """What of that state a paged optimizer keeps in main memory, from where its pages come to the GPU and go: the
    moments of tensors from 100,000 elements."""
    if not name.startswith("paged"):
        return 0
    return sum((2 if "8bit" in name else 8) * n * count for n, count in tensors if n >= 100_000)


# The phases


def work_of(shape: Shape, settings: Settings, run: Run, zero_stage: int = 0) -> Work:
    """The largest micro-batch that trainer/trainer.py can make: completions of full length, filled to the token budget.

    The budget is ``update_token_budget``, or what TRL's padded micro-batch has: rows x (prompt + completion). A group
    that does not fit is cut, each part with its prompt; at least one completion is in a micro-batch.
    """
    work = _micro_batch(shape, settings, run)
    tiled = settings["gradient_checkpointing"] and zero_stage < 3
    return work._replace(tiles=activations.tiles(shape, settings, work.tokens)) if tiled else work


def _micro_batch(shape: Shape, settings: Settings, run: Run) -> Work:
    t = settings["max_completion_length"]
    if settings["max_seq_length_train"]:
        t = max(1, min(t, settings["max_seq_length_train"] - run.prompt))
    if not packs(shape, settings):
        return Work(run.rows, run.rows, run.prompt, t, packed=False)
    budget = settings["update_token_budget"] or run.rows * (run.prompt + t)
    group = settings["num_generations"]
    rows, last = fill(budget, run.prompt, t, group, run.rows * run.steps)
    return Work(-(-(rows + bool(last)) // group), rows, run.prompt, t, packed=True, last=last)


class Stored(NamedTuple):
    """Terms that lie on a GPU all the time, those that come with a backward pass, and those of main memory."""

    always: dict[str, int]
    backward: dict[str, int]
    main: dict[str, int]


def stored(shape: Shape, settings: Settings, zero: Zero, precise: Precision, processes: int) -> Stored:
    """Weights, reference, gradients and optimizer state, on each GPU and in main memory.

    Mixed-precision state under DeepSpeed (arXiv 1910.02054): float32 weights, two moments and a float32 gradient, 16
    bytes, partitioned over processes from stage 1; gradients from stage 2; weights from stage 3; offloaded, all of it
    lies in main memory (arXiv 2101.06840). A bucket of gradients is allocated whole. DDP holds its gradients twice.
    """
    n, full, tensors = processes, not settings["use_peft"], trainable(shape, settings)
    trained = sum(size * count for size, count in tensors)
    share, element = -(-trained // n), precise.stream if full else precise.adapter
    base = weights(shape, settings, precise.stream)
    always, main = {**base, "adapter": 0 if full else trained * element}, {"processes": n * PROCESS}
    if zero.stage == 3:
        always = {name: -(-size // n) for name, size in always.items()}
        if zero.offloads_parameters:
            main["base_weights"], always = sum(base.values()), dict.fromkeys(always, 0)
    if settings["reference_refresh_steps"] and not full:
        always["reference"] = always["adapter"]
    elif settings["beta"] and full:
        always["reference"] = sum(always.values())
    always["cuda_context"] = 0 if settings["use_cpu"] else CONTEXT
    communication = COMMUNICATION if n > 1 and not settings["use_cpu"] else 0
    backward = {"gradients": (share if zero.stage >= 2 else trained) * element}
    if zero.stage:
        state = optimizer_bytes([(share, 1)], settings["optim"], 4) + 4 * share
        if zero.offloads_optimizer:
            main["optimizer"], state = n * (state + 4 * share), 0
        backward["communication"] = communication + zero.bucket * element * (2 if zero.overlaps else 1)
    else:
        state = optimizer_bytes(tensors, settings["optim"], element)
        if paged := paged_bytes(tensors, settings["optim"]):
            main["optimizer"], state = n * paged, state - paged
        communication += trained * element if n > 1 else 0
    return Stored({**always, "optimizer": state, "communication": communication}, backward, main)


def phases(
    shape: Shape, settings: Settings, zero: Zero, precise: Precision, run: Run
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """({"training": {term: bytes}, "generation": {...}} of a policy GPU, the terms of main memory of all processes)."""
    work = work_of(shape, settings, run, zero.stage)
    always, backward, main = stored(shape, settings, zero, precise, run.processes)
    if settings["activation_offloading"]:
        main["activations"] = run.processes * shape.layers * work.tokens * shape.hidden * precise.stream
    training = {**always, **backward, **update(shape, settings, precise, work)}
    generation = {**always}
    if zero.stage == 3:
        live = min(shape.total, 1_000_000_000)  # DeepSpeed's stage3_max_live_parameters
        training["gathered_weights"] = live * precise.stream
        generation["gathered_weights"] = shape.total * precise.stream if run.generation == "transformers" else 0
    if run.generation == "transformers":
        generation |= _transformers_generation(shape, settings, precise, run)
    elif run.generation == "colocate":
        engine = vllm(shape, settings, run.gpu_bytes * settings["vllm_gpu_memory_utilization"], run.prompt)
        generation |= engine
        if not settings["vllm_enable_sleep_mode"]:
            training |= engine
    if not settings["use_cpu"]:
        for terms in (training, generation):
            lost = _slack(shape, settings, precise, run, zero, terms, work if terms is training else None)
            terms["allocator"] = terms.get("allocator", 0) + lost
    found = {"training": training, "generation": generation}
    return {phase: {t: terms[t] for t in TERMS if terms.get(t)} for phase, terms in found.items()}, main


def update(shape: Shape, settings: Settings, precise: Precision, work: Work) -> dict[str, int]:
    """What an update holds at its fullest moment besides what is stored.

    The moments: the LM head's backward pass; that of the last layer, while the gradient of a tied head waits for the
    embedding's; that of the embedding; and the end of the forward pass where autocast has copies of trained weights,
    kept until then. Those lie in segments of their own size, of no use to the wider tensors of the backward pass: the
    allocator's slack there.
    """
    cpu, full = settings["use_cpu"], not settings["use_peft"]
    kept = activations.kept(shape, settings, precise, work, cpu=cpu)
    ends = activations.ends_kept(shape, full, precise, work)
    workspace = activations.lm_head_workspace(shape, full, work.scored, precise)
    workspace += activations.without_triton(shape, work.scored) if cpu else 0
    head = {"activations": kept + ends, "lm_head_workspace": workspace}
    layer = {"activations": kept, "layer_workspace": activations.layer_workspace(shape, settings, precise, work)}
    if settings["gradient_checkpointing"]:
        again = 4 * shape.hidden * work.tokens if precise.stream == 4 else 0  # a float32 norm keeps the layer's input
        layer["recomputed"] = activations.layer_saved(shape, settings, precise, work, cpu=cpu) - again
    moments = [head, layer]
    if full:  # a tied head's gradient and the embedding's become a third that is their sum
        one = shape.vocab * shape.hidden * precise.stream
        layer["gradients_in_transit"] = one if shape.tied else 0
        moments.append({"gradients_in_transit": 3 * one if shape.tied else one})
    if full and precise.stream != precise.compute and settings["gradient_checkpointing"]:
        copies = shape.layers * sum(linear.weights for linear in shape.linears()) * precise.compute
        for terms in moments:
            terms["allocator"] = 0 if cpu else copies
        last = activations.prefill_workspace(shape, settings, precise, work.tokens, work.tiles)
        moments.append({"activations": kept + copies, "layer_workspace": last})
    return max(moments, key=lambda terms: sum(terms.values()))


def _slack(
    shape: Shape, settings: Settings, precise: Precision, run: Run, zero: Zero, terms: dict[str, int], work: Work | None
) -> int:
    """What the allocator reserves beyond these terms, of an update with its ``work`` or of generation: what is left
    over where weights, gradients and moments lie, and holes in what passes. DeepSpeed lays gradients and moments into a
    few large tensors of its own, before all else."""
    own = not settings["use_peft"] and not zero.active  # torch's gradients and moments, a tensor for each weight
    adapter = tuple(size * precise.adapter for size, _ in trainable(shape, settings)) if settings["use_peft"] else ()
    four_bit = settings["load_in_4bit"] or shape.prequantized
    left = slack.of_weights(shape, precise.stream, four_bit, adapter)
    moments = own and "adamw_torch" in settings["optim"]
    if own:
        left *= 1 + (work is not None) + 2 * moments
    share = slack.HOLES_FOUR_BIT if four_bit else slack.HOLES
    fresh = work is not None and run.generation == "transformers"
    if work is None:
        share = slack.HOLES_PREFILL
    elif "allocator" not in terms:
        head = own and "lm_head_workspace" in terms
        share = slack.HOLES_FRESH if fresh else slack.HOLES_HEAD if head else share
        share = slack.HOLES_PINNED if moments else share
    holes = share * sum(terms.get(term, 0) for term in TEMPORARY)
    if fresh or not settings["gradient_checkpointing"]:
        holes += slack.HOLES_KEPT * terms.get("activations", 0)
    if work is not None and settings["load_in_4bit"]:
        passing = sum(terms.get(term, 0) for term in (*TEMPORARY, "activations"))
        holes = max(holes, _second_tile(shape, settings, precise, work) - passing)
        if precise.stream == 4 and work.tiles > 1:
            holes = max(holes, slack.HOLES_TILES * terms.get("activations", 0))
    return left + int(holes)


def _second_tile(shape: Shape, settings: Settings, precise: Precision, work: Work) -> int:
    """What an update reserves, besides what is stored, where the LM head's tile of logits needs a second segment.

    The head's backward pass first makes a float32 gradient of the hidden states. A 4-bit base leaves no free block of
    that width but the tile's own of the forward pass: no LoRA there reads a float32 copy. It is cut, and what layers
    leave is too narrow for a tile.
    """
    kept = activations.kept(shape, settings, precise, work) + activations.ends_kept(shape, False, precise, work)
    head = activations.lm_head_workspace(shape, False, work.scored, precise)
    tile = min(work.scored, activations.HEAD_TOKENS) * activations.HEAD_VOCAB * precise.half
    return kept + head + tile + activations.prefill_workspace(shape, settings, precise, work.tokens, work.tiles)


def _transformers_generation(shape: Shape, settings: Settings, precise: Precision, run: Run) -> dict[str, int]:
    """`generate` samples a process's whole rollout at once, and holds most in its prefill or at its end.

    The prefill takes each prompt once, but each row where decoding.py leaves generation to transformers: unpacked, or
    with a dropout, which TRL does not turn off. The end: keys and values of all rows, of a layer twice, when its buffer
    grows, and five float32 copies of the logits. With tools the prefill of a later turn takes what it adds of every
    row, a result of at most a completion's length.

    The segments of buffers that have since grown are not counted: the allocator gives whole ones back before it fails.
    """
    rows = -(-run.rollout // run.processes)
    lean = packs(shape, settings) and not (settings["use_peft"] and settings["lora_dropout"] > 0)
    prompts = -(-rows // settings["num_generations"]) if lean else rows
    token, length = shape.kv_bytes_per_token(precise.stream), settings["max_completion_length"]
    if lean:  # every so many tokens decoding.py makes a layer's buffers so much longer
        length = -(-length // (ROOM + 1)) * (ROOM + 1)
    cache = rows * (run.prompt + length) * token
    tokens = prompts * run.prompt
    prefill = {"kv_cache": tokens * token}
    if settings["tools"]:
        tokens, prefill = max(tokens, rows * settings["max_completion_length"]), {"kv_cache": cache}
    tiled = activations.tiles(shape, settings, tokens)
    prefill["sampling"] = activations.prefill_workspace(shape, settings, precise, tokens, tiled)
    grown = 0 if settings["use_cpu"] else min(cache // 8, 2 * shape.layers * slack.ROUNDED)
    end = {"kv_cache": cache + cache // shape.layers, "sampling": rows * shape.vocab * 20, "allocator": grown}
    return max(prefill, end, key=lambda terms: sum(terms.values()) + slack.HOLES_PREFILL * terms["sampling"])


def vllm(shape: Shape, settings: Settings, share: float, prompt: int) -> dict[str, int]:
    """vLLM takes its whole share of the GPU: weights in 16 bit (TRL hands it bitsandbytes where the base is quantised),
    overhead, and keys and values in the rest; at least those of one sequence of its context length."""
    tp = settings["vllm_tensor_parallel_size"]
    own = -(-sum(weights(shape, {**settings, "cast_lm_head_to_fp32": False}, 2).values()) // tp)
    one = -(-sequence_bytes(shape, settings, prompt) // tp)
    cache = max(int(share) - own - VLLM_OVERHEAD, one)
    return {"vllm_weights": own, "vllm_kv_cache": cache, "vllm_overhead": VLLM_OVERHEAD}


def context_length(shape: Shape, settings: Settings, prompt: int) -> int:
    """Tokens of one sequence that vLLM must be able to hold: its context length, by default the model's own."""
    return settings["vllm_max_model_length"] or shape.max_tokens or prompt + settings["max_completion_length"]


def sequence_bytes(shape: Shape, settings: Settings, prompt: int) -> int:
    return context_length(shape, settings, prompt) * shape.kv_bytes_per_token(2)
