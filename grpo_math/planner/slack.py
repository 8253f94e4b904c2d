"""What torch's caching allocator reserves of a GPU beyond what is live there at the fullest moment, in bytes. Pure.

It asks the GPU for whole segments, cuts blocks out of them, and keeps what is freed. So it holds the rest of each
segment that weights lie in, which is played through the model of the allocator that the simulation has; and holes among
what comes and goes, since the blocks that one moment leaves are not of the size that the next one asks for. How many
depends on the order of some ten thousand requests: for them stands a bound.

Does not know what a middle of a long generation leaves behind, nor expandable segments, which leave less.
"""

from functools import lru_cache

from grpo_math.planner.model import Shape
from grpo_math.planner.simulation.allocator import Allocator

# Of what comes and goes at the fullest moment: bounds of what simulated runs show, those of all shipped recipes
# (docs/planning.md has the table) and of some models of few layers.
HOLES = 0.34  # 11 to 33% in an update
HOLES_FOUR_BIT = 0.48  # to 46% over a base in 4 bit, whose maps are made whole and dropped in between
HOLES_FRESH = 0.66  # 24 to 64%: after generation the cache is empty, and a step's parts come in any order
HOLES_PINNED = (
    0.58  # 35 to 57%: the state that the first optimizer step makes lies in holes, and keeps them from closing
)
HOLES_HEAD = 1.0  # 99% where the moments lie elsewhere: gradients lie where the trained head's own tensors would fit
HOLES_PREFILL = 0.25  # 12 to 24% in generation
ROUNDED = 2 << 20  # a buffer of keys or values that has grown lies in a segment of its own, of whole 2 MB
HOLES_TILES = 0.4  # of the kept inputs of layers, 35%, where each is cut from the wider block of an MLP's tile
HOLES_KEPT = 0.15  # of what layers keep, without checkpointing or after generation


@lru_cache(maxsize=256)
def of_weights(shape: Shape, element: int, four_bit: bool, adapter: tuple[int, ...] = ()) -> int:
    """What is left of the segments in which the weights lie, in the order in which a model is made: of ``element``
    bytes each, or matrices of half a byte; then, layer by layer, the tensors of ``adapter``, by their bytes.

    >>> from grpo_math.planner.model import shape_of, shipped
    >>> shape = shape_of("mine", shipped()["Qwen/Qwen2.5-7B"])
    >>> of_weights(shape, 2, False) >> 20, of_weights(shape, 2, False, (2**20 + 2**18,)) >> 20
    (172, 137)
    """
    layer = []
    for linear in shape.linears():
        layer += [linear.weights // 2, linear.weights // 64] if four_bit else [linear.weights * element]
        layer += [linear.n_out * element] * linear.bias
    ends = [shape.vocab * shape.hidden * element]
    sizes = [*ends, *layer * shape.layers, *([] if shape.tied else ends), *adapter * shape.layers]
    allocator = Allocator()
    for size in sizes:
        allocator.take(size)
    return allocator.reserved - sum(sizes)
