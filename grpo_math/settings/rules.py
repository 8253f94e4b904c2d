"""Rules for combinations of settings, in one table that `MathGRPOConfig`, `grpo-math doctor` and training read.

>>> settings = defaults() | {"output_dir": "run"}
>>> [(level, line)] = violations({**settings, "surrogate": "reinforce", "epsilon": 0.1})
>>> level, str(line)
('warning', 'epsilon=0.1 has no effect: the surrogate reinforce does not read it: leave it out')

The table is rules.yaml. The rules that are written here share a text with other code, or follow from another table.
fields.py checks the type, range and choices of each setting. checks/ has the checks that need data.
"""

import logging
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.generation.vllm_server import ABOVE, NO_ADDRESS, RANKS
from grpo_math.problems.from_recipe import evaluates
from grpo_math.rewards.functions import SHIPPED
from grpo_math.run.weights import launched_with
from grpo_math.settings.fields import defaults
from grpo_math.settings.surrogates import READ_BY, TRL_LOSSES, surrogate_and_reduction
from grpo_math.settings.vllm import teacher_url
from grpo_math.system.addresses import is_address, is_this_machine
from grpo_math.system.reading import is_table
from grpo_math.system.user_functions import is_user_function
from grpo_math.system.yaml_files import read_yaml

logger = logging.getLogger(__name__)
Settings = Mapping[str, Any]
LEAVE = "leave it out"
NO_PREFETCH = "cannot prefetch: {} change what is requested from vLLM"


# Facts that follow from several settings, or that need code


def steps_in_backward(optim: str) -> bool:
    """Return True for an optimizer of transformers that steps in each backward pass, layer by layer."""
    return "lomo" in optim or optim.endswith("layerwise")


def surrogate_of(s: Settings) -> str:
    """Return the surrogate that ``surrogate``, or TRL's ``loss_type``, names; "module:function" for any of a user."""
    name, _ = surrogate_and_reduction(s["surrogate"], s["loss_type"])
    return "module:function" if is_user_function(name) else name


def needs_whole_micro_batches(s: Settings) -> bool:
    """Return True if a term of the loss is a mean or a quantile over a micro-batch, so that no token budget splits it.

    A mixture of experts with an auxiliary loss has such a term, too.
    """
    return bool(s["entropy_coef"] or s["use_adaptive_entropy"] or s["top_entropy_quantile"] < 1)


def keyword(s: Settings, mapping: str, name: str, default: Any = None) -> Any:
    """Return an entry of a setting that is a mapping. The setting may also be empty, or the path of a file."""
    return s[mapping].get(name, default) if isinstance(s[mapping], dict) else default


def _is_pattern(s: Settings) -> bool:
    """Return True if peft can read the modules: TRL makes a list of one name a string, which is a pattern."""
    modules = s["lora_target_modules"] or []
    with suppress(re.error):
        return len(modules) != 1 or bool(re.compile(modules[0]))
    return False


# Names in generation_kwargs that change the distribution that vLLM samples from, and not the trainer's.
BIASING = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"),
    *("structured_outputs", "logits_processors"),
)
NEGATIVE = [name for name, one in SHIPPED.items() if one.can_be_negative]
# Names in the conditions of rules that are not settings.
FACTS: dict[str, Callable[[Settings], Any]] = {
    "has_baseline_function": lambda s: is_user_function(s["baseline"]),
    "surrogate_of": surrogate_of,
    "names_another_surrogate": lambda s: (
        s["surrogate"] not in ("clip", TRL_LOSSES.get(s["loss_type"], (s["surrogate"],))[0])
    ),
    "highest_ratio": lambda s: 1 + (s["epsilon_high"] or s["epsilon"]),
    "needs_whole_micro_batches": needs_whole_micro_batches,
    "steps_in_backward": lambda s: steps_in_backward(s["optim"]),
    "under_fsdp": lambda s: s["fsdp"] or launched_with("FSDP"),
    "teacher_url": teacher_url,
    "on_this_machine": lambda s: is_this_machine(s["vllm_server_host"]),
    "port_in_url": lambda s: re.search(rf":{s['vllm_server_port']}(/|$)", s["vllm_server_base_url"]),
    "is_server_address": lambda s: is_address(s["vllm_server_base_url"]),
    "is_teacher_address": lambda s: is_address(s["reference_model"]),
    "biased_sampling": lambda s: any(keyword(s, "generation_kwargs", name) for name in BIASING),
    "samples": lambda s: (
        keyword(s, "generation_kwargs", "do_sample", True) and keyword(s, "generation_kwargs", "num_beams", 1) == 1
    ),
    "evaluates": evaluates,
    "splits_groups": lambda s: any(keyword(s, "accelerator_config", f"{how}_batches") for how in ("split", "dispatch")),
    "is_one_split": lambda s: is_table(s["dataset"]) and "[" not in s["dataset_split"],
    "has_python": lambda s: "python" in s["tools"],
    "has_one_reward": lambda s: len(s["rewards"]) == 1,
    "repeats_rewards": lambda s: len(set(s["rewards"])) < len(s["rewards"]),
    "negative_rewards": lambda s: set(s["rewards"]) & set(NEGATIVE) or min(s["reward_weights"] or (0,)) < 0,
    "weights_fit_rewards": lambda s: s["reward_weights"] is None or len(s["reward_weights"]) == len(s["rewards"]),
    "is_pattern": _is_pattern,
    "eight_ranks": lambda s: 8 * s["lora_r"],
}


def changed(s: Settings, names: str) -> list[str]:
    """Return the settings in ``names``, separated by spaces, that do not have their defaults and are not empty."""
    return [name for name in names.split() if s[name] not in (defaults()[name], "", [], {})]


def value_of(s: Settings, name: str) -> Any:
    """Return a setting or a fact."""
    return FACTS[name](s) if name in FACTS else s[name]


def fits(s: Settings, name: str, expected: Any) -> bool:
    """Return True if a setting, or a fact, has a value as rules.yaml describes it.

    >>> s = {"use_vllm": True, "vllm_mode": "server", "max_steps": 8, "logging_steps": 9}
    >>> fits(s, "use_vllm", True), fits(s, "vllm_mode", ["server"]), fits(s, "logging_steps", {"gt": "max_steps"})
    (True, True, True)
    """
    value = value_of(s, name)
    if isinstance(expected, dict):
        [(sign, bound)] = expected.items()
        if sign == "not":
            return not fits(s, name, bound)
        if sign == "contains":
            return isinstance(value, dict) and bound in value
        limit = value_of(s, bound) if isinstance(bound, str) else bound
        return value is not None and bool(getattr(operator, sign)(value, limit or 0))
    if isinstance(expected, bool):
        return bool(value) == expected
    return value in expected if isinstance(expected, list) else bool(value == expected)


class Rule(NamedTuple):
    """A rule for several settings. ``fields`` names the settings at fault, separated by spaces; ``when``, ``reason``
    and ``remedy`` are as in rules.yaml; ``level``: error or warning; ``of_defaults``: no field has to be changed."""

    fields: str
    when: Sequence[Mapping[str, Any]]
    reason: str
    remedy: str = LEAVE
    level: str = "error"
    of_defaults: bool = False

    def broken(self, s: Settings) -> bool:
        """Return True if the settings break the rule."""
        return any(all(fits(s, *one) for one in conditions.items()) for conditions in self.when) and (
            self.of_defaults or bool(changed(s, self.fields))
        )


def from_row(
    fields: str,
    when: Any = None,
    error: str = "",
    warning: str = "",
    no_effect: str = "",
    remedy: str = LEAVE,
    without: str = "",
) -> Rule:
    """Return the rule of a row of rules.yaml.

    >>> from_row("use_.*dora", without="use_peft")[:3]
    ('use_dora', [{'use_peft': False}], 'has no effect: use_peft is not set')
    """
    if without:
        when, no_effect, remedy = {without: False}, f"{without} is not set", f"set {without}, or {LEAVE}"
    known = defaults()
    # Most words are names. An expression is compared with every name.
    names = [
        name for word in fields.split() for name in ([word] if word in known else known) if re.fullmatch(word, name)
    ]
    alternatives = when if isinstance(when, list) else [when or {}]
    of_defaults = not no_effect and any(name in conditions for name in names for conditions in alternatives)
    reason = error or warning or f"has no effect: {no_effect}"
    return Rule(" ".join(names), alternatives, reason, remedy, "error" if error else "warning", of_defaults)


TABLE = read_yaml(Path(__file__).with_name("rules.yaml"))
OF_SURROGATES = tuple(dict.fromkeys(" ".join(READ_BY.values()).split()))
TRAINER_RULES = [
    *(from_row(**row) for row in TABLE["trainer"]),
    *(
        Rule(
            " ".join(name for name in OF_SURROGATES if name not in read.split()),
            [{"surrogate_of": surrogate}],
            f"has no effect: the surrogate {surrogate} does not read it",
            level="warning",
        )
        for surrogate, read in {**READ_BY, "module:function": ""}.items()
    ),
    Rule("reference_model", [{"teacher_url": True, "is_teacher_address": False}], *NO_ADDRESS),
    Rule("vllm_server_base_url", [{"vllm_server_base_url": True, "is_server_address": False}], *NO_ADDRESS),
]
PROGRAM = [
    *(from_row(**row) for row in TABLE["program"]),
    *(
        Rule(mapping, [{mapping: {"contains": name}}], f"sets {name}, which has a field", f"set {field}")
        for mapping, keywords in TABLE["keywords"].items()
        for name, field in keywords.items()
    ),
    Rule("staleness", [{"tools": True}], NO_PREFETCH.format("tools"), "leave it at 0"),
    Rule("lora_r", [{"use_peft": True, "use_vllm": True, "vllm_sync": "adapter", "lora_r": {"gt": RANKS[-1]}}], *ABOVE),
    Rule(
        "rewards",
        [{"scale_rewards": "mean", "negative_rewards": True}],
        "can be negative, and scale_rewards='mean' (MaxRL) divides by their mean",
        f"leave out {', '.join(NEGATIVE)} and negative reward_weights",
        of_defaults=True,
    ),
]
RULES = [*TRAINER_RULES, *PROGRAM]


def violations(s: Settings, rules: Sequence[Rule] = RULES) -> Iterator[tuple[str, ConfigError]]:
    """Yield the level and the error of each broken rule. ``s`` has every field that the rules read."""
    for rule in rules:
        if rule.broken(s):
            # The settings that the user has changed are at fault. If none is, a default is.
            name, *more = changed(s, rule.fields) or rule.fields.split()
            others = f"(and {', '.join(more)}) " if more else ""
            yield rule.level, ConfigError(name, s[name], others + rule.reason.format_map(s), rule.remedy.format_map(s))


def refuse(s: Settings) -> None:
    """Raise the first error of the settings of a `MathGRPOConfig`; log the warnings if there is no error."""
    # An error comes before a warning.
    for level, line in sorted(violations(s, TRAINER_RULES), key=operator.itemgetter(0)):
        if level == "error":
            raise line
        logger.warning(str(line))
