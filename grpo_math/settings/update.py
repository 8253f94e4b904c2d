"""An update: its groups, its speed and its memory. Settings and rules."""

from dataclasses import dataclass

from grpo_math.settings.declare import Facts, Rule, setting
from grpo_math.settings.trl_types import GRPOConfig

FACTS: Facts = {"resample_groups": {"ge": 0}, "max_tokens_per_micro_batch": {"ge": 0}, "max_nonfinite_steps": {"ge": 1}}


@dataclass
class Update(GRPOConfig):
    """Updates."""

    resample_groups: int = setting(
        0,
        "Dynamic sampling, as in DAPO: extra rounds in which groups that are all correct or all wrong are "
        "replaced by fresh prompts; 0: none.",
    )
    pack_updates: bool = setting(
        True,
        "Compute the prompt of a group once, compute no padding, and skip completions whose advantage is zero. "
        "The gradient is the same; false computes as TRL does, to compare.",
    )
    max_tokens_per_micro_batch: int = setting(
        0,
        "The most tokens in one pass of a packed update; 0: as many as TRL's padded micro-batch would have. A longer "
        "completion stays whole.",
    )
    activation_offloading: bool = setting(
        False,
        "Keep what gradient checkpointing saves of each layer in pinned main memory, for longer completions "
        "(grpo-math plan).",
    )
    longest_first: bool | None = setting(
        None,
        "Compute the largest possible micro-batch before the first step (default: on a GPU). Running out of memory "
        "shows at once.",
    )

    max_nonfinite_steps: int = setting(
        10,
        "This many steps in a row whose gradient is not finite end the run, with a checkpoint. Such a step changes no "
        "weight.",
    )

    @property
    def needs_whole_micro_batches(self) -> bool:
        """Return True if a term of the loss is a mean or a quantile over a micro-batch, so that no token budget splits
        it. A mixture of experts with an auxiliary loss has such a term, too.
        """
        return bool(self.entropy_coef or self.use_adaptive_entropy or self.top_entropy_quantile < 1)

    @property
    def steps_in_backward(self) -> bool:
        """Return True for an optimizer of transformers that steps in each backward pass, layer by layer."""
        return "lomo" in self.optim or self.optim.endswith("layerwise")


RULES = [
    Rule(
        "error",
        "resample_groups",
        lambda s: s.resample_groups and s.multi_objective_aggregation == "normalize_then_sum",
        "does not work with multi_objective_aggregation='normalize_then_sum', which normalizes what was drawn",
    ),
    Rule(
        "no_effect",
        "max_tokens_per_micro_batch",
        lambda s: s.needs_whole_micro_batches,
        "entropy_coef={entropy_coef}, use_adaptive_entropy={use_adaptive_entropy} and "
        "top_entropy_quantile={top_entropy_quantile} look at whole micro-batches of per_device_train_batch_size",
    ),
    Rule(
        "error",
        "activation_offloading",
        lambda s: s.activation_offloading and not s.gradient_checkpointing,
        "without gradient_checkpointing would copy all that every layer saves",
        "set gradient_checkpointing to true",
    ),
    Rule(
        "warning",
        "torch_compile torch_compile_backend torch_compile_mode",
        lambda s: (s.torch_compile or s.torch_compile_backend or s.torch_compile_mode) and s.pack_updates,
        "would compile again for every packed row: rows are scored unpacked",
        "leave it out, or set pack_updates to false",
    ),
    Rule(
        "warning",
        "optim",
        lambda s: s.pack_updates and s.steps_in_backward,
        "steps in each backward pass, once for each micro-batch of a packed update: rows are scored unpacked",
        "use another optimizer, or set pack_updates to false",
    ),
]
