"""What a CUDA kernel takes for itself while it runs, which no tensor of the program shows. Bytes, from the kernels'
sources.

Does not know cuBLAS's workspace, which is part of the CUDA context's allowance.
"""

from math import prod
from typing import Any


def of(func: Any, args: tuple[Any, ...]) -> list[int]:
    """Sizes of what is allocated within the operator and gone after it."""
    rule = RULES.get(str(func))
    return [size for size in rule(args) if size] if rule else []


def _flash(rows: int, q: Any, k: Any) -> list[int]:
    """FlashAttention 2: dq in float32, a number a row; dk and dv for every query head where heads are grouped."""
    grouped = k.size(1) != q.size(1)
    keys = k.numel() // k.size(1) * q.size(1) * k.element_size() if grouped else 0
    return [rows * -(-q.size(-1) // 32) * 32 * 4, rows * 4, keys, keys]


def _flash_backward(args: tuple[Any, ...]) -> list[int]:
    q = args[1]
    return _flash(prod(q.shape[:2]) * -(-q.size(2) // 128) * 128, q, args[2])


def _varlen_backward(args: tuple[Any, ...]) -> list[int]:
    """Sequences of unequal length: tokens (L, H, D), and 128 more rows a sequence."""
    q = args[1]
    return _flash((q.size(0) + 128 * (args[6].numel() - 1)) * q.size(1), q, args[2])


def _efficient_backward(args: tuple[Any, ...]) -> list[int]:
    """The memory-efficient kernel: delta, and the gradient of the queries in float32."""
    return [prod(args[1].shape[:3]) * 4]


def _gemm_4bit(args: tuple[Any, ...]) -> list[int]:
    """bitsandbytes: many rows are multiplied with the weights in full; nested constants are spelled out in float32."""
    weights, nested = prod(args[2]), len(args) > 6 and args[6] is not None
    return [weights * args[0].element_size(), weights // args[4] * 4 * nested]


RULES = {
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
    "torch_attn._varlen_attn_backward.default": _varlen_backward,
    "aten._flash_attention_backward.default": _varlen_backward,
    "bitsandbytes.gemm_4bit.default": _gemm_4bit,
}
