"""A measured model and settings -> bytes of each term on one GPU, during training and during generation.

A term is counted (weights, adapter, gradients, optimizer state, KV cache, the LM head), measured (activations and the
temporaries of a layer, by measure.py) or an allowance (`CONTEXT`, `COMMUNICATION`, `VLLM_OVERHEAD`, `FRAGMENTATION`).
The sum of the terms is an upper bound, because not all terms peak at the same time. Nothing here has been measured on
a GPU.

memory_plan.py decides whether a recipe fits.
"""

from typing import NamedTuple

from grpo_math.generation.dtypes import number_formats
from grpo_math.planner.cards import TABLES
from grpo_math.planner.model import Shape, wanted_modules
from grpo_math.planner.settings import Json, LaunchSettings, Zero
from grpo_math.planner.work import Machine, Work, tiles
from grpo_math.settings.batch import Batch
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.machine import GB

# Bytes outside torch's allocator, and the memory that the allocator reserves beyond the live tensors (cards.yaml).
CONTEXT, COMMUNICATION, VLLM_OVERHEAD = (
    int(TABLES["memory"][name] * GB) for name in ("context", "communication", "vllm")
)
FRAGMENTATION = TABLES["fragmentation"]
VLLM_SERVER_SHARE = 0.9  # vLLM's default of gpu_memory_utilization
# A tile of TRL's fused LM head (TOKEN_CHUNK_SIZE and chunk size); layer inputs that TRL's offloading keeps on the GPU.
HEAD_TOKENS, HEAD_VOCAB, OFFLOAD_STASH = 4096, 32768, 5
ROOM = 64  # free tokens in the cache of generation/decoding.py after it grows
RANK = 16  # the smallest measured rank; other ranks are rounded up to a power of two
PROCESS = 2 * GB  # main memory of a process: Python, torch and transformers

Terms = dict[str, int]  # bytes by name, as printed with spaces
# Terms outside torch's allocator.
BUCKETS, GATHERED = "gradient_buckets_and_NCCL", "weights_gathered_by_ZeRO-3"
OUTSIDE = ("CUDA_context", BUCKETS, "vLLM_weights", "vLLM_KV_cache", "vLLM_overhead")


class Precision(NamedTuple):
    """Bytes per element of the weights and the residual stream, and of the adapter's weights."""

    stream: int
    adapter: int
    autocast: bool


def total(terms: Terms) -> int:
    return sum(terms.values())


def at(line: list[float], sizes: tuple[int, ...]) -> int:
    """Return the bytes of a measured line at these sizes."""
    return int(sum(a * b for a, b in zip(line, sizes, strict=True)))


def precision(settings: RunSettings, zero: Zero, deepspeed: LaunchSettings | None) -> Precision:
    """Return the precision with which TRL, peft and accelerate load this recipe.

    peft keeps a LoRA's weights in float32 on a 16-bit base (autocast_adapter_dtype). TRL casts them to bfloat16 on a
    quantised base (arXiv 2305.14314, section 3), which trainer/float16.py undoes. TRL leaves them in the base's dtype
    under ZeRO-3. Under DeepSpeed, accelerate replaces autocast with DeepSpeed's 16-bit mode, which casts everything.
    A CPU is counted as one without 16-bit formats, the upper bound.
    """
    config = deepspeed or {}
    formats = number_formats(settings, "float32" if settings.use_cpu else "bfloat16", has_copy=zero.active)
    stream, autocast = formats.width, formats.bf16 or formats.fp16
    enabled = [config[name].get("enabled") for name in ("bf16", "fp16") if name in config]
    # transformers replaces auto in DeepSpeed's file by the training arguments.
    if zero.active and (autocast if not enabled or "auto" in enabled else any(enabled)):
        return Precision(2, 2, False)
    adapter = stream if zero.stage == 3 else 4
    return Precision(stream, 2 if settings.load_in_4bit and not settings.fp16 else adapter, autocast)


# Stored tensors


def weights(shape: Shape, settings: RunSettings, stream: int) -> int:
    """Return the bytes of the base model.

    4 bit (bitsandbytes; arXiv 2305.14314): half a byte a weight, and a constant of 4 bytes for a block of 64. With
    double quantisation the constant has 1 byte, and 256 of them have another of 4 bytes. Embeddings, LM head, norms,
    biases and stacked experts are not quantised.
    """
    element: float = stream
    if settings.load_in_4bit:
        element = 1 / 2 + (1 + 4 / 256 if settings.use_bnb_nested_quant else 4) / 64
    return int(shape.matrices * element) + (shape.total - shape.matrices) * stream


def dequantised(shape: Shape, settings: RunSettings, stream: int) -> int:
    """Return the bytes of the largest matrix that bitsandbytes dequantises for a product, and of its constants."""
    return shape.largest * stream + shape.largest // 16 if settings.load_in_4bit else 0


def trainable(shape: Shape, settings: RunSettings, precise: Precision | None = None) -> int:
    """Return the number of trained parameters."""
    if not settings.use_peft:
        return shape.total
    how = measurement_settings(shape, settings, precise or precision(settings, Zero(None, shape.hidden), None), 1)
    fixed, adapting = shape.measured(how)["trained"]
    return int(fixed + adapting * settings.lora_r // how["lora"]["r"])


def measurement_settings(
    shape: Shape, settings: RunSettings, precise: Precision, tiles: int, work: Work | None = None
) -> Json:
    """Return the settings that measure.py needs.

    A micro-batch is measured at its real size if its memory is not linear in its tokens.
    """
    lora: Json | None = None
    if settings.use_peft:
        # Recipes that differ only in rank or dropout share a measurement. trainable() scales the rank back.
        rank = max(RANK, 1 << (settings.lora_r - 1).bit_length())
        dropout = 0.05 if settings.lora_dropout > 0 else 0.0
        lora = {"r": rank, "target_modules": wanted_modules(settings), "lora_dropout": dropout}
        others = ("use_dora", "lora_target_parameters", "lora_modules_to_save")
        lora |= {name.removeprefix("lora_"): getattr(settings, name) for name in others if getattr(settings, name)}
    return {
        **precise._asdict(),
        "lora": lora,
        "cpu": settings.use_cpu,
        "checkpointing": settings.gradient_checkpointing,
        "tiles": tiles,
        "row": work.groups if work and not shape.linear else None,
    }


def optimizer_bytes(trained: int, name: str, element: int) -> int:
    """Return the bytes of an optimizer's state for parameters of ``element`` bytes.

    AdamW (arXiv 1711.05101) keeps two moments in the dtype of the parameter, 8 bytes for float32. bitsandbytes' 8-bit
    AdamW (arXiv 2110.02861) keeps 2 bytes a parameter, and two constants of 4 bytes for a block of 256. Small tensors,
    which stay in 32 bit, are not counted. The state of a paged optimizer counts as on the GPU, although its pages can
    move to main memory.

    >>> [optimizer_bytes(1024, name, 2) for name in ("adamw_torch", "adamw_8bit", "paged_adamw_32bit", "sgd")]
    [4096, 2080, 8192, 0]
    """
    if "8bit" in name:
        return 2 * trained + trained // 32
    return trained * {"sgd": 0, "paged_adamw_32bit": 8}.get(name, 2 * element)


# The phases


def resident_memory(
    shape: Shape, settings: RunSettings, zero: Zero, precise: Precision, processes: int, teacher: Shape | None = None
) -> tuple[Terms, Terms, Terms]:
    """Return the terms that are always on a GPU, those that a backward pass adds, and those of main memory.

    Mixed-precision state under DeepSpeed (arXiv 1910.02054): float32 weights, two moments and a float32 gradient, 16
    bytes a parameter. The state is partitioned over processes from stage 1, gradients from stage 2, weights from stage
    3. Offloaded state is in main memory (arXiv 2101.06840). A whole bucket of gradients is allocated. DDP stores its
    gradients twice.
    """
    n, full = processes, not settings.use_peft
    trained = trainable(shape, settings, precise)
    share = -(-trained // n)
    element = precise.stream if full else precise.adapter
    always = {"base_weights": weights(shape, settings, precise.stream), "adapter": 0 if full else trained * element}
    if settings.cast_lm_head_to_fp32:  # a tied head is the embedding
        always["base_weights"] += (4 - precise.stream) * shape.vocab * shape.hidden
    main = {"processes": n * PROCESS}
    if zero.stage == 3:
        main |= {"base_weights": always["base_weights"]} if zero.offloads_parameters else {}
        always = {name: 0 if zero.offloads_parameters else -(-size // n) for name, size in always.items()}
    # With a new adapter, TRL switches it off to score the reference. The reference is a copy of the adapter if it is
    # refreshed, or if the adapter was trained before. With full fine-tuning, the reference is a second model.
    # `reference_model` is another model.
    second = total(always) if full and settings.beta else 0
    if teacher:
        second = weights(teacher, settings.derived(load_in_4bit=False), precise.stream)
    copies = settings.reference_refresh_steps or (settings.adapter and settings.beta)
    always["reference"] = second or (always["adapter"] if copies else 0)
    backward = {"gradients": (share if zero.stage >= 2 else trained) * element}
    if zero.stage:
        # ZeRO flattens its partition of the weights: one tensor, with a float32 copy.
        optimizer = "adamw_torch" if zero.replaces_optimizer else settings.optim
        always["optimizer_state"] = optimizer_bytes(share, optimizer, 4) + 4 * share
        if zero.offloads_optimizer:
            main["optimizer_state"] = n * (always.pop("optimizer_state") + 4 * share)
        # DeepSpeed fills one bucket while another is on its way.
        backward[BUCKETS] = zero.bucket * element * (2 if zero.overlaps else 1)
    else:
        always["optimizer_state"] = optimizer_bytes(trained, settings.optim, element)
        # accelerate leaves gradient_as_bucket_view off, so DDP's buckets are a second copy of the gradients.
        always[BUCKETS] = trained * element if n > 1 else 0
    return always, backward, main


class Generator(NamedTuple):
    """The terms of what generates on a policy GPU: during an update, during generation, and in main memory.

    A term that the policy has, too, replaces the policy's.
    """

    training: Terms
    generation: Terms
    main: Terms


def phases(
    machine: Machine, settings: RunSettings, zero: Zero, precise: Precision, batch: Batch, generates: str, work: Work
) -> tuple[dict[str, Terms], Terms]:
    """Return {"training": {term: bytes}, "generation": {...}} of a policy GPU, and the main memory of all processes.

    ``generates``: transformers, colocate or server.
    """
    shape = machine.shape
    always, backward, main = resident_memory(shape, settings, zero, precise, batch.processes, machine.teacher)
    if settings.activation_offloading:
        main["activations"] = batch.processes * shape.layers * work.sizes[1] * shape.hidden * precise.stream
    if zero.stage == 3:
        # The default of DeepSpeed's stage3_max_live_parameters.
        backward[GATHERED] = min(shape.total, 1_000_000_000) * precise.stream
    updating = {**always, **backward, **update(shape, settings, precise, work)}

    generator = Generator({}, {}, {})  # on separate GPUs
    if generates == "transformers":
        generator = transformers_generation(machine, settings, zero, precise, batch)
    elif generates == "colocate":
        generator = colocated_vllm(machine, settings, precise, batch)
    main |= generator.main

    by_phase = {"training": updating | generator.training, "generation": always | generator.generation}
    for phase, terms in by_phase.items():
        if settings.use_cpu:  # each process has a copy in the same memory
            copies = {term: size * batch.processes for term, size in terms.items()}
            by_phase[phase] = {**copies, "processes": main["processes"]}
        else:
            by_phase[phase] = terms | gpu_overhead(terms, generates, batch.processes)
    return {phase: {term: size for term, size in terms.items() if size} for phase, terms in by_phase.items()}, main


def gpu_overhead(terms: Terms, generates: str, processes: int) -> Terms:
    """Return the terms of a GPU that nobody asks for: fragmentation, the CUDA context, the buffers of NCCL."""
    allocated = sum(size for term, size in terms.items() if term not in OUTSIDE)
    return {
        "fragmentation": int(FRAGMENTATION[generates] * allocated),
        "CUDA_context": CONTEXT,
        BUCKETS: terms.get(BUCKETS, 0) + (COMMUNICATION if processes > 1 else 0),
    }


def colocated_vllm(machine: Machine, settings: RunSettings, precise: Precision, batch: Batch) -> Generator:
    """Return the terms of a vLLM engine on the GPU of the policy, which may sleep during an update."""
    share = int(machine.gpu_bytes * settings.vllm_gpu_memory_utilization)
    element = precise.stream if settings.vllm_share_weights else 2
    engine = vllm(machine.shape, settings, share, machine.prompt, element)
    asleep = settings.vllm_enable_sleep_mode
    if settings.vllm_share_weights:
        # The one copy of the base is in vLLM's share. A sleeping engine gives back the rest of the share.
        in_share = {**engine, "base_weights": 0}
        return Generator({"base_weights": engine["vLLM_weights"]} if asleep else in_share, in_share, {})
    # An engine that gets adapters sleeps at level 1, which moves its weights to main memory.
    is_moved = asleep and settings.sends_adapter
    main = {"vLLM_weights": batch.processes * engine["vLLM_weights"]} if is_moved else {}
    return Generator({} if asleep else engine, engine, main)


def update(shape: Shape, settings: RunSettings, precise: Precision, work: Work) -> Terms:
    """Return the terms of an update at its memory peak, without the stored tensors.

    The candidates: the LM head's forward pass, while autocast has copies of trained weights; its backward pass; the
    backward pass of the layers, while the gradient of a tied head is kept for the embedding; the sum of both gradients.
    """
    measurement = shape.measured(measurement_settings(shape, settings, precise, work.tiles, work))
    away = 0
    if settings.activation_offloading:
        away = max(0, shape.layers - OFFLOAD_STASH) * work.sizes[1] * shape.hidden * precise.stream
    end, kept = (at(measurement[name], work.sizes) - away for name in ("forward", "backward"))
    fullest = max(at(line, work.sizes) for line in measurement["moments"]) - away
    fullest += dequantised(shape, settings, precise.stream)
    # TRL's fused head saves the hidden states, and of each token the target (8 bytes), the log-sum and the entropy.
    scored = work.scored * (shape.hidden * precise.stream + 16)
    half = 2 if precise.autocast else precise.stream  # bytes per element of a matrix product
    tile = min(work.scored, HEAD_TOKENS) * HEAD_VOCAB * half
    if precise.stream != half:  # a slice of the weights after the cast
        tile += min(shape.vocab, HEAD_VOCAB) * shape.hidden * half
    head = 0 if settings.use_peft else shape.vocab * shape.hidden  # trained parameters
    # trl/kernels/chunked_logprob.py: the hidden states and the trained head have a float32 gradient, and a second one
    # in their dtype if it is not float32.
    gradients = (work.scored * shape.hidden + head) * {4: 4, 2: 6}[precise.stream]
    if settings.use_cpu:  # without Triton there are seven float32 tensors of a tile's size
        gradients += 7 * 4 * min(work.scored, HEAD_TOKENS) * min(shape.vocab, HEAD_VOCAB)
    transit = head * precise.stream if shape.tied else 0
    return max(
        {"activations": end + scored, "fused_LM_head": tile},
        {"activations": kept + scored, "fused_LM_head": tile + gradients},
        {"activations": kept, "temporaries_of_a_layer": fullest - kept, "gradients_on_their_way": transit},
        {"gradients_on_their_way": head * precise.stream + 2 * transit},
        key=total,
    )


def transformers_generation(
    machine: Machine, settings: RunSettings, zero: Zero, precise: Precision, batch: Batch
) -> Generator:
    """Return the terms of `generate` for a process's whole rollout at its peak, in the prefill or at the end.

    The prefill contains each prompt once. It contains each row if decoding.py leaves generation to transformers: with a
    dropout, which TRL does not turn off. At the end there are the keys and values of all
    rows, those of one layer twice while its buffer grows, and five float32 copies of the logits.
    """
    shape, width, length = machine.shape, machine.prompt, settings.max_completion_length
    constant, token = (elements * precise.stream for elements in shape.cache)
    rows = prompts = -(-batch.rollout // batch.processes)
    if not (settings.use_peft and settings.lora_dropout > 0):
        prompts = -(-rows // batch.generations)
        # decoding.py extends a layer's buffers in steps.
        length = -(-length // (ROOM + 1)) * (ROOM + 1)
    cache = rows * (constant + (width + length) * token)
    tokens = prompts * width
    entered = prompts * constant + tokens * token
    lines = shape.measured(measurement_settings(shape, settings, precise, tiles(shape, settings, tokens)))["prefill"]
    sampling = max(at(line, (1, tokens, tokens * width)) for line in lines)
    peak = max(
        {"KV_cache": entered, "prefill_and_sampling": sampling + dequantised(shape, settings, precise.stream)},
        {"KV_cache": cache + cache // shape.layers, "prefill_and_sampling": rows * shape.vocab * 20},
        key=total,
    )
    # ds3_gather_for_generation is on by default: TRL gathers the whole model on each process.
    gathered = {GATHERED: shape.total * precise.stream} if zero.stage == 3 else {}
    return Generator({}, gathered | peak, {})


def vllm(shape: Shape, settings: RunSettings, share: int, prompt: int, element: int = 2) -> Terms:
    """Return the terms of vLLM, which fills its whole share of the GPU.

    The terms are weights of ``element`` bytes (TRL passes bitsandbytes weights if the base is quantised), overhead, and
    a KV cache in the remaining memory. The KV cache has at least one sequence of the context length.

    >>> from types import SimpleNamespace
    >>> shape = SimpleNamespace(total=10_000, matrices=0, cache=(4, 20), max_tokens=64)
    >>> settings = RunSettings({"vllm_tensor_parallel_size": 2})
    >>> vllm(shape, settings, share=0, prompt=10)  # 10,000 x 2 / 2 and (4 + 64 x 20) x 2 / 2 bytes
    {'vLLM_weights': 10000, 'vLLM_KV_cache': 1284, 'vLLM_overhead': 1073741824}
    """
    tp = settings.vllm_tensor_parallel_size
    # vLLM dequantises nested constants.
    weight_bytes = -(-weights(shape, settings.derived(use_bnb_nested_quant=False), element) // tp)
    cache = max(share - weight_bytes - VLLM_OVERHEAD, -(-sequence_bytes(shape, settings, prompt) // tp))
    return {"vLLM_weights": weight_bytes, "vLLM_KV_cache": cache, "vLLM_overhead": VLLM_OVERHEAD}


def server(machine: Machine, settings: RunSettings, tensor_parallel: int) -> Terms:
    """Return the terms of a GPU of a vLLM server, which fills its share."""
    engine = server_settings(settings.derived(vllm_tensor_parallel_size=tensor_parallel), machine.prompt)
    share = int(VLLM_SERVER_SHARE * machine.gpu_bytes) - CONTEXT
    return {**vllm(machine.shape, engine, share, machine.prompt), "CUDA_context": CONTEXT}


def context_length(shape: Shape, settings: RunSettings, prompt: int) -> int:
    """Return vLLM's context length in tokens, by default the model's. vLLM must be able to hold one such sequence.

    >>> from types import SimpleNamespace
    >>> settings = RunSettings({"max_completion_length": 512})
    >>> [context_length(SimpleNamespace(max_tokens=most), settings, prompt=10) for most in (4096, None)]
    [4096, 522]
    """
    return settings.vllm_max_model_length or shape.max_tokens or prompt + settings.max_completion_length


def server_settings(settings: RunSettings, prompt: int) -> RunSettings:
    """Return the settings of a server that has room for one sequence of the recipe.

    Without vllm_max_model_length, its context is as long as its memory allows (train/serve.py).
    """
    tokens = settings.vllm_max_model_length or prompt + settings.max_completion_length
    return settings.derived(vllm_max_model_length=tokens)


def sequence_bytes(shape: Shape, settings: RunSettings, prompt: int) -> int:
    """Return the bytes of a sequence of `context_length` in vLLM's KV cache, in 16 bit."""
    constant, token = shape.cache
    return 2 * (constant + context_length(shape, settings, prompt) * token)
