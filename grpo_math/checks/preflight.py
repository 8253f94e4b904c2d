"""What is checked before a run: settings, problems, rewards, machine and services -> findings, in seconds.

`grpo-math doctor` prints them, and training asks for them before weights load. A check is a function of checks/ that
says what it sees, or raises the `UserError` that training would end with.

>>> from grpo_math.settings.recipe import read
>>> settings = read(["--model_name_or_path", "embedded", "--lora_target_modules", "q_prj", "--use_peft"])
>>> [found] = [f for f in preflight(Setup(settings.values, settings.given), only=("adapter",))]
>>> found.line()
"error: lora_target_modules='q_prj' matches no linear map of a layer. Remedy: use all-linear, or ... (adapter)"

Does not import torch, and does not look at a model's weights: doctor.py does, with --deep.
"""

from collections.abc import Callable, Collection, Iterator

from grpo_math.checks import Finding, machine, model, prompts, rewards, services
from grpo_math.checks.setup import Said, Setup, said
from grpo_math.errors import UserError
from grpo_math.run.main_process import on_main
from grpo_math.settings import rules
from grpo_math.settings.recipe import Recipe


def ask(setup: Setup, checks: Collection[str]) -> list[str]:
    """What `grpo-math doctor` finds: the lines of its warnings; an error ends the run, on every process alike."""

    return on_main(lambda: warning_lines(setup, checks))


def warning_lines(setup: Setup, checks: Collection[str]) -> list[str]:
    """Return the lines of the warnings. Raise `UserError` for the first error."""
    lines = []
    for finding in preflight(setup, checks):
        if finding.level == "error":
            raise refusal(finding)
        if finding.level == "warning":
            lines.append(finding.line())
    return lines


def settings(setup: Setup) -> Iterator[Said]:
    """Settings do not contradict each other, and each has an effect."""
    lines = [said(line, level) for level, line in rules.violations(setup.settings)]
    # What has no effect is of interest once the rest works.
    yield from [line for line in lines if line.level == "error"] or lines


Check = Callable[[Setup], Iterator[Said]]
# In this order: training ends with the first error. What may ask the network comes late.
CHECKS: dict[str, Check] = {
    "settings": settings,
    "versions": machine.versions,
    "number_format": machine.number_formats,
    "deepspeed": machine.launched,
    "in_use": machine.in_use,
    "problems": rewards.problems,
    "output_dir": machine.output_dir,
    "batch": rewards.batch,
    "golds": rewards.golds,
    "rewards": rewards.rewards,
    "model": model.model,
    "adapter": model.adapter,
    "trackers": services.trackers,
    "hub": services.hub,
    "vllm_server": services.vllm_server,
    "ports": services.ports,
    "disk": machine.disk,
    "python_tool": machine.python_tool,
}
COUNTED = ("settings", "disk", "memory")  # mean nothing for settings that cannot run: left out after an error
OF_MODEL = ("adapter", "end_of_turn", "prompt_lengths")  # of one that is there, and whose chat template works
# Those that need the tokenizer, whose package imports torch.
WITH_TOKENIZER: dict[str, Check] = {
    "chat_template": prompts.chat_template,
    "end_of_turn": prompts.end_of_turn,
    "padding": prompts.padding,
    "prompt_lengths": prompts.prompt_lengths,
    "memory": machine.memory_plan,
}


def preflight(setup: Setup, only: Collection[str] = tuple(CHECKS), failed: bool = False) -> Iterator[Finding]:
    """The findings of these checks, each as soon as it is known. An error that two checks meet is said once.

    ``failed``: an error is known already.
    """
    told, model_failed = set[str](), False
    for name, check in {**CHECKS, **WITH_TOKENIZER}.items():
        if name not in only or (failed and name in COUNTED) or (model_failed and name in OF_MODEL):
            continue
        try:
            for found in check(setup):
                failed |= found.level == "error"
                yield Finding(found.level, name, found.message, found.remedy)
        except UserError as error:
            failed, model_failed = True, model_failed or name in ("model", "chat_template")
            if str(error) not in told:
                told.add(str(error))
                yield finding_of(error, name)


# What a run can be refused for before torch is imported, and before anyone knows how many processes it will have.
EARLY = (
    *("settings", "versions", "number_format", "deepspeed", "in_use", "problems", "output_dir", "rewards", "trackers"),
)


def refuse_early(read: Recipe) -> None:
    """Raise what training would end with, where that can be known in a second; training asks for the rest."""
    warning_lines(Setup(read.sound().values, read.given), EARLY)  # not `ask`, which imports torch


def finding_of(error: UserError, check: str) -> Finding:
    """Return an error as a finding.

    >>> from grpo_math.errors import ConfigError
    >>> finding_of(ConfigError("beta", -1, "is negative", "give 0 or more"), "settings").line()
    'error: beta=-1 is negative. Remedy: give 0 or more (settings)'
    """
    level, message, remedy = said(error)
    return Finding(level, check, message, remedy)


def refusal(finding: Finding) -> UserError:
    """A finding as the one line that a run ends with."""
    return UserError(f"{finding.message}: {finding.remedy}")
