"""A measured model and settings -> bytes of each term on one GPU, during training and during generation.

A term is counted (weights, adapter, gradients, optimizer state, KV cache, the LM head), measured (activations and the
temporaries of a layer, by measure.py) or an allowance (`CONTEXT`, `COMMUNICATION`, `VLLM_OVERHEAD`, `FRAGMENTATION`).
The sum of the terms is an upper bound, because not all terms peak at the same time. Nothing here has been measured on
a GPU.

Does not decide whether a recipe fits: plan.py does.
"""

from typing import Any, NamedTuple

from grpo_math.planner.model import Shape, wanted_modules
from grpo_math.planner.settings import Settings, Zero
from grpo_math.planner.work import ROOM, Run, Work, tiles, work_of
from grpo_math.run.machine import GB

CONTEXT = int(0.6 * GB)  # a CUDA context, its kernels, cuBLAS
COMMUNICATION = int(0.3 * GB)  # NCCL's buffers, with more than one process
VLLM_OVERHEAD = 1 * GB  # vLLM's activations at 4096 tokens a step, and its CUDA graphs
VLLM_SERVER_SHARE = 0.9  # vLLM's default of gpu_memory_utilization
# Memory that the caching allocator reserves beyond the live tensors, as a share of them. The simulated runs reserve 0.3
# to 5.2% more (tests/benchmarks/plans.md). Training sets expandable segments, which vLLM's sleep mode does not allow:
# next to a colocated vLLM the segments have a fixed size, and the same runs reserved 1 to 11% more.
FRAGMENTATION = {"transformers": 0.04, "server": 0.04, "colocate": 0.078}
# A tile of TRL's fused LM head (TOKEN_CHUNK_SIZE and chunk size); layer inputs that TRL's offloading keeps on the GPU.
HEAD_TOKENS, HEAD_VOCAB, OFFLOAD_STASH = 4096, 32768, 5
RANK = 16  # the smallest measured rank; other ranks are rounded up to a power of two
PROCESS = 2 * GB  # of main memory: Python, torch and transformers in one process

Terms = dict[str, int]  # bytes by name
TERMS = {
    "base_weights": "base weights",
    "adapter": "adapter",
    "gradients": "gradients",
    "gradients_in_transit": "gradients on their way",
    "optimizer": "optimizer state",
    "communication": "gradient buckets, NCCL",
    "gathered_weights": "weights gathered by ZeRO-3",
    "activations": "activations",
    "layer_workspace": "temporaries of a layer",
    "lm_head_workspace": "fused LM head",
    "reference": "reference",
    "kv_cache": "KV cache",
    "sampling": "prefill and sampling",
    "allocator": "fragmentation",
    "vllm_weights": "vLLM weights",
    "vllm_kv_cache": "vLLM KV cache",
    "vllm_overhead": "vLLM overhead",
    "cuda_context": "CUDA context",
    "processes": "processes",
}

# Terms outside torch's allocator.
OUTSIDE = ("cuda_context", "communication", "vllm_weights", "vllm_kv_cache", "vllm_overhead")


class Precision(NamedTuple):
    """Bytes per element of the weights and the residual stream, and of the adapter's weights."""

    stream: int
    adapter: int
    autocast: bool

    @property
    def half(self) -> int:
        """Bytes per element of a matrix product. bitsandbytes ignores autocast."""
        return 2 if self.autocast else self.stream


def at(line: list[float], sizes: tuple[int, ...]) -> int:
    return int(sum(a * b for a, b in zip(line, sizes, strict=True)))


def precision(settings: Settings, zero: Zero, deepspeed: Settings | None) -> Precision:
    """Return the precision with which TRL, peft and accelerate load this recipe.

    peft keeps a LoRA's weights in float32 on a 16-bit base (autocast_adapter_dtype). TRL casts them to bfloat16 on a
    quantised base (arXiv 2305.14314, section 3), and leaves them in the base's dtype under ZeRO-3. Under DeepSpeed,
    accelerate replaces autocast with DeepSpeed's 16-bit mode, which casts everything. ``auto`` is bfloat16 on a GPU,
    except for trained weights without a float32 copy (build.py). On a CPU it is counted as float32, the upper bound.
    """
    cpu, quantised = settings["use_cpu"], settings["load_in_4bit"] or settings["load_in_8bit"]
    auto = settings["dtype"] == "auto" and not cpu and (settings["use_peft"] or zero.active)
    half = settings["dtype"] in ("bfloat16", "float16") or auto
    stream = 2 if half else 4
    # The config turns bf16 on by default if the GPU has it, and leaves it off on a CPU (trainer/config.py).
    autocast = bool(settings["fp16"] or (not cpu if settings["bf16"] is None else settings["bf16"]))
    stated = [(deepspeed or {})[name].get("enabled") for name in ("bf16", "fp16") if name in (deepspeed or {})]
    # transformers replaces auto in DeepSpeed's file by the training arguments.
    if zero.active and (autocast if not stated or "auto" in stated else any(stated)):
        return Precision(2, 2, False)
    adapter = 2 if quantised else (stream if zero.stage == 3 else 4)
    return Precision(stream, adapter, autocast)


# Stored tensors


def weights(shape: Shape, settings: Settings, stream: int) -> int:
    """Return the bytes of the base model.

    4 bit (bitsandbytes; arXiv 2305.14314): half a byte a weight, in blocks of 64, and a table of 16 floats a matrix. A
    block has a constant of 4 bytes, or 1 with double quantisation. Double quantisation adds constants of 4 bytes for
    256 blocks, an offset of 4 bytes and a table of 256 floats. 8 bit (arXiv 2208.07339): 1 byte a weight, 4 a row.
    Embeddings, LM head, norms, biases and stacked experts are not quantised.
    """
    matrices = sum(linear.weights * linear.layers for linear in shape.linears)
    other = (shape.total - matrices) * stream
    if settings["cast_lm_head_to_fp32"]:  # a tied head is the embedding
        other += (4 - stream) * shape.vocab * shape.hidden
    if settings["load_in_4bit"]:
        nested = settings["use_bnb_nested_quant"]
        quantised = sum(linear.layers * four_bit(linear.weights, nested) for linear in shape.linears)
    elif settings["load_in_8bit"]:
        quantised = sum(linear.layers * (linear.weights + 4 * linear.n_out) for linear in shape.linears)
    else:
        quantised = matrices * stream
    return quantised + other


def four_bit(n: int, nested: bool) -> int:
    """Return the bytes of ``n`` weights in bitsandbytes' 4 bit.

    >>> four_bit(64 * 256, nested=False), four_bit(64 * 256, nested=True)
    (9280, 9544)
    """
    blocks = -(-n // 64)
    constants = blocks + -(-blocks // 256) * 4 + 4 + 256 * 4 if nested else blocks * 4
    return -(-n // 2) + constants + 16 * 4


def dequantised(shape: Shape, settings: Settings, stream: int) -> int:
    """Return the bytes of the largest matrix that bitsandbytes dequantises for a product, and of its constants."""
    if not settings["load_in_4bit"]:
        return 0
    return max(linear.weights * stream + linear.weights // 64 * 4 for linear in shape.linears)


def trainable(shape: Shape, settings: Settings, precise: Precision | None = None) -> list[tuple[int, int]]:
    """Return (parameters of a tensor, number of such tensors) for all trained tensors."""
    if not settings["use_peft"]:
        return list(shape.tensors)
    how = how_of(shape, settings, precise or precision(settings, Zero(None, shape.hidden), None), 1)
    rank, r = how["lora"]["r"], settings["lora_r"]
    trained = shape.measured(how)["trained"]
    return [(size * r // rank if adapts else size, count) for size, adapts, count in trained]


def how_of(
    shape: Shape, settings: Settings, precise: Precision, tiles: int, work: Work | None = None
) -> dict[str, Any]:
    """Return the settings that measure.py needs.

    A micro-batch is measured at its real size if its memory is not linear in its tokens.
    """
    lora: dict[str, Any] | None = None
    row: list[Any] | None = None
    if work and not shape.linear:
        row = [{"prompt": work.prompt - 1, "lengths": lengths} for lengths in work.groups]
    if settings["use_peft"]:
        # Recipes that differ only in rank or dropout share a measurement. trainable() scales the rank back.
        rank, drops = max(RANK, 1 << (settings["lora_r"] - 1).bit_length()), settings["lora_dropout"] > 0
        lora = {"r": rank, "target_modules": wanted_modules(settings), "lora_dropout": 0.05 if drops else 0.0}
        given = {"use_dora": "use_dora", "lora_target_parameters": "target_parameters"}
        given["lora_modules_to_save"] = "modules_to_save"
        lora |= {option: settings[name] for name, option in given.items() if settings[name]}
    return {
        "stream": precise.stream,
        "adapter": precise.adapter,
        "autocast": precise.autocast,
        "lora": lora,
        "cpu": settings["use_cpu"],
        "checkpointing": settings["gradient_checkpointing"],
        "tiles": tiles,
        "row": row,
    }


def optimizer_bytes(tensors: list[tuple[int, int]], name: str, element: int) -> int:
    """Return the bytes of an optimizer's state for tensors whose elements have ``element`` bytes.

    AdamW (arXiv 1711.05101) keeps two moments in the dtype of the parameter, 8 bytes for float32. torch adds a step of
    4 bytes a tensor. bitsandbytes' 8-bit AdamW (arXiv 2110.02861) keeps 2 bytes a parameter, two constants of 4 bytes
    for a block of 256, and two tables of 256 floats in total. Tensors below 4096 elements stay in 32 bit. The state of
    a paged optimizer counts as on the GPU, although its pages can move to main memory.

    >>> optimizer_bytes([(1024, 2), (4096, 1)], "adamw_torch", 4)
    49164
    >>> optimizer_bytes([(1024, 2), (4096, 1)], "adamw_8bit", 4)
    26752
    """
    if name == "sgd":
        return 0
    if "8bit" in name:
        return 2 * 256 * 4 + sum((8 * n if n < 4096 else 2 * n + 8 * -(-n // 256)) * count for n, count in tensors)
    if name == "paged_adamw_32bit":
        return sum(8 * n * count for n, count in tensors)
    return sum((2 * element * n + 4) * count for n, count in tensors)


# The phases


def stored(
    shape: Shape, settings: Settings, zero: Zero, precise: Precision, processes: int
) -> tuple[Terms, Terms, Terms]:
    """Return the terms that are always on a GPU, those that a backward pass adds, and those of main memory.

    Mixed-precision state under DeepSpeed (arXiv 1910.02054): float32 weights, two moments and a float32 gradient, 16
    bytes a parameter. The state is partitioned over processes from stage 1, gradients from stage 2, weights from stage
    3. Offloaded state is in main memory (arXiv 2101.06840). A whole bucket of gradients is allocated. DDP stores its
    gradients twice.
    """
    n, full, tensors = processes, not settings["use_peft"], trainable(shape, settings, precise)
    trained = sum(size * count for size, count in tensors)
    share, element = -(-trained // n), precise.stream if full else precise.adapter
    base = weights(shape, settings, precise.stream)
    always, main = {"base_weights": base, "adapter": 0 if full else trained * element}, {"processes": n * PROCESS}
    if zero.stage == 3:
        always = {name: -(-size // n) for name, size in always.items()}
        if zero.offloads_parameters:
            main["base_weights"], always = base, dict.fromkeys(always, 0)
    # With an adapter, TRL switches it off to score the reference, so only a refreshed reference is a copy. With full
    # fine-tuning, the reference is a second model.
    if settings["reference_refresh_steps"] and not full:
        always["reference"] = always["adapter"]
    elif settings["beta"] and full:
        always["reference"] = sum(always.values())
    always["cuda_context"] = 0 if settings["use_cpu"] else CONTEXT
    communication = COMMUNICATION if n > 1 and not settings["use_cpu"] else 0
    backward = {"gradients": (share if zero.stage >= 2 else trained) * element}
    if zero.stage:
        # ZeRO flattens its partition of the weights: one tensor, with a float32 copy.
        state = optimizer_bytes([(share, 1)], settings["optim"], 4) + 4 * share
        if zero.offloads_optimizer:
            main["optimizer"], state = n * (state + 4 * share), 0
        # DeepSpeed fills one bucket while another is on its way.
        backward["communication"] = communication + zero.bucket * element * (2 if zero.overlaps else 1)
    else:
        state = optimizer_bytes(tensors, settings["optim"], element)
        # accelerate leaves gradient_as_bucket_view off, so DDP's buckets are a second copy of the gradients.
        communication += trained * element if n > 1 else 0
    return {**always, "optimizer": state, "communication": communication}, backward, main


def phases(
    shape: Shape, settings: Settings, zero: Zero, precise: Precision, run: Run
) -> tuple[dict[str, Terms], Terms]:
    """Return {"training": {term: bytes}, "generation": {...}} of a policy GPU, and the main memory of all processes."""
    work = work_of(shape, settings, run, zero.stage)
    processes = run.batch.processes
    always, backward, main = stored(shape, settings, zero, precise, processes)
    if settings["activation_offloading"]:
        main["activations"] = processes * shape.layers * work.tokens * shape.hidden * precise.stream
    training = {**always, **backward, **update(shape, settings, precise, work)}
    generation = {**always}
    if zero.stage == 3:
        # The default of DeepSpeed's stage3_max_live_parameters.
        live = min(shape.total, 1_000_000_000)
        training["gathered_weights"] = live * precise.stream
        # ds3_gather_for_generation is on by default: TRL gathers the whole model on each process.
        generation["gathered_weights"] = shape.total * precise.stream if run.generation == "transformers" else 0
    if run.generation == "transformers":
        generation |= _transformers_generation(shape, settings, precise, run)
    elif run.generation == "colocate":
        engine = vllm(shape, settings, run.gpu_bytes * settings["vllm_gpu_memory_utilization"], run.prompt)
        generation |= engine
        # TRL puts a sleeping engine to level 2, which frees weights and cache. Otherwise vLLM keeps its share.
        if not settings["vllm_enable_sleep_mode"]:
            training |= engine
    if not settings["use_cpu"]:
        for terms in (training, generation):
            allocated = sum(size for term, size in terms.items() if term not in OUTSIDE)
            terms["allocator"] = int(FRAGMENTATION[run.generation] * allocated)
    by_phase = {"training": training, "generation": generation}
    return {phase: {t: terms[t] for t in TERMS if terms.get(t)} for phase, terms in by_phase.items()}, main


def update(shape: Shape, settings: Settings, precise: Precision, work: Work) -> Terms:
    """Return the terms of an update at its memory peak, without the stored tensors.

    The candidates: the LM head's forward pass, while autocast has copies of trained weights; its backward pass; the
    backward pass of the layers, while the gradient of a tied head is kept for the embedding; the sum of both gradients.
    """
    full, sizes = not settings["use_peft"], work.sizes
    measurement = shape.measured(how_of(shape, settings, precise, work.tiles, work))
    away = 0
    if settings["activation_offloading"]:
        away = max(0, shape.layers - OFFLOAD_STASH) * work.tokens * shape.hidden * precise.stream
    end, kept = (at(measurement[name], sizes) - away for name in ("forward", "backward"))
    fullest = max(at(line, sizes) for line in measurement["moments"]) - away
    fullest += dequantised(shape, settings, precise.stream)
    # TRL's fused head saves the hidden states, and of each token the target (8 bytes), the log-sum and the entropy.
    scored = work.scored * (shape.hidden * precise.stream + 16)
    tile = min(work.scored, HEAD_TOKENS) * HEAD_VOCAB * precise.half
    if precise.stream != precise.half:  # a slice of the weights after the cast
        tile += min(shape.vocab, HEAD_VOCAB) * shape.hidden * precise.half
    one = shape.vocab * shape.hidden * precise.stream if full else 0
    transit = one if shape.tied else 0
    return max(
        {"activations": end + scored, "lm_head_workspace": tile},
        {"activations": kept + scored, "lm_head_workspace": tile + head_gradients(shape, settings, precise, work)},
        {"activations": kept, "layer_workspace": fullest - kept, "gradients_in_transit": transit},
        {"gradients_in_transit": one + 2 * transit},
        key=lambda terms: sum(terms.values()),
    )


def head_gradients(shape: Shape, settings: Settings, precise: Precision, work: Work) -> int:
    """Return the bytes of the gradients in TRL's fused LM head (trl/kernels/chunked_logprob.py).

    The hidden states and, if the head is trained, its weights have a float32 gradient, and a second gradient in their
    dtype if it is not float32. Without Triton, as on a CPU, there are seven float32 tensors of a tile's size.
    """
    gradients = 4 + (precise.stream if precise.stream != 4 else 0)
    trained = shape.vocab * shape.hidden if not settings["use_peft"] else 0
    plain = 7 * 4 * min(work.scored, HEAD_TOKENS) * min(shape.vocab, HEAD_VOCAB) if settings["use_cpu"] else 0
    return (work.scored * shape.hidden + trained) * gradients + plain


def _transformers_generation(shape: Shape, settings: Settings, precise: Precision, run: Run) -> Terms:
    """Return the terms of `generate` for a process's whole rollout at its peak, in the prefill or at the end.

    The prefill contains each prompt once. It contains each row if decoding.py leaves generation to transformers: with a
    dropout, which TRL does not turn off. At the end there are the keys and values of all
    rows, those of one layer twice while its buffer grows, and five float32 copies of the logits. With tools, the
    prefill of a later turn contains the tool result of each row, at most as long as a completion.
    """
    rows = -(-run.batch.rollout // run.batch.processes)
    lean = not (settings["use_peft"] and settings["lora_dropout"] > 0)
    prompts = -(-rows // settings["num_generations"]) if lean else rows
    constant, token = (elements * precise.stream for elements in shape.cache)
    length = settings["max_completion_length"]
    if lean:  # decoding.py extends a layer's buffers in steps of ROOM + 1 tokens
        length = -(-length // (ROOM + 1)) * (ROOM + 1)
    cache = rows * (constant + (run.prompt + length) * token)
    prefill, width = {"kv_cache": prompts * (constant + run.prompt * token)}, run.prompt
    if settings["tools"]:
        prompts, width = rows, max(run.prompt, settings["max_completion_length"])
        prefill = {"kv_cache": cache}
    tokens = prompts * width
    how = how_of(shape, settings, precise, tiles(shape, settings, tokens))
    lines = shape.measured(how)["prefill"]
    prefill["sampling"] = max(at(line, (1, tokens, tokens * width)) for line in lines)
    prefill["sampling"] += dequantised(shape, settings, precise.stream)
    end = {"kv_cache": cache + cache // shape.layers, "sampling": rows * shape.vocab * 20}
    return max(prefill, end, key=lambda terms: sum(terms.values()))


def vllm(shape: Shape, settings: Settings, share: float, prompt: int) -> Terms:
    """Return the terms of vLLM, which fills its whole share of the GPU.

    The terms are weights in 16 bit (TRL passes bitsandbytes weights if the base is quantised), overhead, and a KV cache
    in the remaining memory. The KV cache has at least one sequence of the context length.
    """
    tp = settings["vllm_tensor_parallel_size"]
    weight_bytes = -(-weights(shape, {**settings, "cast_lm_head_to_fp32": False}, 2) // tp)
    one = -(-sequence_bytes(shape, settings, prompt) // tp)
    cache = max(int(share) - weight_bytes - VLLM_OVERHEAD, one)
    return {"vllm_weights": weight_bytes, "vllm_kv_cache": cache, "vllm_overhead": VLLM_OVERHEAD}


def context_length(shape: Shape, settings: Settings, prompt: int) -> int:
    """Return vLLM's context length in tokens, by default the model's. vLLM must be able to hold one such sequence."""
    return settings["vllm_max_model_length"] or shape.max_tokens or prompt + settings["max_completion_length"]


def sequence_bytes(shape: Shape, settings: Settings, prompt: int) -> int:
    return 2 * shape.cache[0] + context_length(shape, settings, prompt) * shape.kv_bytes_per_token(2)
