"""How data sets are evaluated: the sampling settings, and each set as its authors evaluate it."""

from dataclasses import dataclass

from grpo_math.errors import ConfigError, UserError, require_choice
from grpo_math.problems.prompts import Template
from grpo_math.problems.sources import DEFAULT_SOURCE, SOURCES, SUITES, listed, source_name


@dataclass(frozen=True)
class Sampling:
    """The sampling settings: ``samples`` completions of each problem at ``temperature``, where 0 is greedy."""

    samples: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 512
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens", "batch_size"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(name, value, "evaluates nothing", "give 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError("temperature", self.temperature, "is out of range", "0 is greedy, above 0 samples")
        if self.samples > 1 and self.temperature == 0:
            reason = "cannot be drawn at temperature 0"
            raise ConfigError("samples", self.samples, reason, "give 1, or a temperature above 0")


def sets(data: str | None, suite: str | None) -> list[str]:
    """Return the data sets that ``--data`` or ``--suite`` names. Raises `UserError` if none is named, or one twice.

    >>> sets("gsm8k,math500", None), sets(None, "math")[:2]
    (['gsm8k', 'math500'], ['gsm8k', 'math500'])
    """
    if data is not None and suite is not None:
        raise UserError("--suite would be ignored by --data: leave one of them out")
    if suite is not None:
        require_choice("suite", suite, tuple(SUITES))
        return list(SUITES[suite])
    if data is None:
        raise UserError("--data is missing: give a model and data, or two results files with --compare")
    names = listed(data)
    if "" in names or len(set(names)) < len(names):
        raise ConfigError("data", data, "names nothing, or one set twice", "give names with commas between them")
    return names


def evaluation_protocol(
    name: str, template: str | Template | None, samples: int | None, temperature: float | None
) -> tuple[str | Template, int, float]:
    """Return template, samples and temperature of a set: the given ones, else its authors'; one sample if greedy.

    >>> [evaluation_protocol(name, None, None, None)[1] for name in sets(None, "math")]
    [1, 1, 1, 1, 32, 32, 32]
    >>> evaluation_protocol("math-ai/aime25", None, 4, None), evaluation_protocol("owner/name", None, None, None)
    (('boxed', 4, 0.6), ('gsm8k', 1, 0.0))
    >>> evaluation_protocol("aime2024", None, None, None), evaluation_protocol("aime2024", "gsm8k", None, 0.0)
    (('boxed', 32, 0.6), ('gsm8k', 1, 0.0))
    """
    source = SOURCES.get(source_name(name) or "", DEFAULT_SOURCE)
    chosen_temperature = source.temperature if temperature is None else temperature
    # Greedy samples would all be equal.
    drawn = (source.samples if chosen_temperature > 0 else 1) if samples is None else samples
    return template or source.template, drawn, chosen_temperature
