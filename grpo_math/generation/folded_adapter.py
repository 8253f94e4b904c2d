"""A LoRA in the format of its base while a model generates: two operators for each adapted map instead of six.

peft casts the input to float32, multiplies by A, by B and by the scale, adds, and casts back. A decoded token is so
little work that a GPU waits for these launches. Here A and ``scale * B`` are cast once per call of `generate`:

    y = W x + (scale * B) (A x)

The products are rounded as in an update under autocast and in vLLM: 16-bit factors, summed in float32.

Leaves other layers to peft: DoRA, several active adapters, active dropout, 4 bit, merged or embedded maps, and layers
with a hook or a forward method of a script.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from grpo_math.system.replaced import replaced
from grpo_math.system.user_functions import is_foreign


@contextmanager
def folded_adapter(model: Any) -> Iterator[None]:
    """Compute the plain LoRA layers of a model by `FoldedLayer` inside this context."""
    from peft.tuners.lora import Linear

    with ExitStack() as stack:
        for layer in model.modules():
            if type(layer) is Linear and (adapter := _plain_adapter(layer)):
                stack.enter_context(replaced(layer, forward=FoldedLayer(layer, adapter)))
        yield


class FoldedLayer:
    """The forward method of peft's ``lora.Linear`` with one plain adapter."""

    def __init__(self, layer: Any, adapter: str) -> None:
        self.base = layer.base_layer
        self.down = layer.lora_A[adapter].weight.detach()  # (r, in)
        self.up = (layer.lora_B[adapter].weight.detach() * layer.scaling[adapter]).t()  # (r, out)

    def __call__(self, inputs: Tensor) -> Tensor:
        output = self.base(inputs)
        # Only the output shows the format: autocast may have another one than the weights.
        if self.down.dtype != output.dtype:
            self.down = self.down.to(output.dtype)
            self.up = self.up.to(output.dtype)
        # In place, because `addmm` would first copy the output.
        output.view(-1, self.up.size(1)).addmm_(linear(inputs, self.down).view(-1, self.up.size(0)), self.up)
        return output


def _plain_adapter(layer: Any) -> str | None:
    """Return the one active adapter of peft's ``lora.Linear``, or None if the layer is more than `FoldedLayer`."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(active) != 1 or layer.lora_variant.get(active[0]):
        return None
    down, up, dropout = (part[active[0]] for part in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    maps = (layer.base_layer, down, up)
    is_plain = (
        all(type(part) is nn.Linear and type(part.weight) is nn.Parameter for part in maps)
        and down.bias is None
        and up.bias is None
        and not (isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0)
        # A hook or a method of a script would not run, or would see another output.
        and not any(part._forward_hooks or part._forward_pre_hooks for part in (*maps, dropout))
        and not any("forward" in vars(part) for part in (layer, *maps, dropout))
        and not is_foreign(type(layer).forward)
    )
    return active[0] if is_plain else None
