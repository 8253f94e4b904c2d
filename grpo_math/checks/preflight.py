"""The checks before a run: settings, problems, rewards, machine and services -> findings, in seconds.

`grpo-math doctor` prints the findings, and training runs the checks before weights load. A check is a function of
checks/ that yields findings without its name, or raises the `UserError` that training would end with.

>>> from grpo_math.settings.recipe import read
>>> settings = read(["--model_name_or_path", "embedded", "--lora_target_modules", "q_prj", "--use_peft"])
>>> [finding] = preflight(Setup(settings), only=("adapter",))
>>> print(finding.line())
error: lora_target_modules='q_prj' matches no linear map of a layer. Remedy: use all-linear, or ... (adapter)

Imports no torch.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from grpo_math.checks import Finding, attack, audit, check_machine, check_model, check_rewards, check_services
from grpo_math.checks.setup import Setup, as_finding
from grpo_math.errors import UserError
from grpo_math.planner.settings import NotPlanned
from grpo_math.settings import rules
from grpo_math.settings.recipe import Recipe
from grpo_math.system.collectives import broadcast_from_main


def ask(setup: Setup, checks: Collection[str]) -> list[str]:
    """Return the lines of the warnings. Raise `UserError` for the first error. All ranks call this, and get the same.

    >>> from grpo_math.settings.recipe import read
    >>> settings = read(["--dataset", "generated:sums", "--per_device_train_batch_size", "8"])
    >>> ask(Setup(settings), ["batch"])
    ['warning: a step has 1 prompt, so its gradient is mostly noise. Remedy: prompts_per_step: 16 (batch)']
    >>> ask(Setup(settings), ["model"])
    Traceback (most recent call last):
    ...
    grpo_math.errors.UserError: model_name_or_path=None is missing: give a folder, a Hub id, or 'embedded'
    """
    return broadcast_from_main(lambda: warning_lines(setup, checks))


def warning_lines(setup: Setup, checks: Collection[str]) -> list[str]:
    """Return the lines of the warnings. Raise `UserError` for the first error."""
    lines = []
    for finding in preflight(setup, checks):
        if finding.level == "error":
            raise UserError(f"{finding.message}: {finding.remedy}")
        if finding.level == "warning":
            lines.append(finding.line())
    return lines


def settings(setup: Setup) -> list[Finding]:
    """Settings do not contradict each other, and each has an effect."""
    lines = [as_finding(line, "settings", level) for level, line in rules.violations(setup.settings)]
    # Warnings about settings without effect are left out while there are errors.
    return [line for line in lines if line.level == "error"] or lines


# A check that only raises returns None.
Check = Callable[[Setup], Iterable[Finding] | None]
# The order matters, because training ends with the first error. Checks that use the network come late.
CHECKS: dict[str, Check] = {
    "settings": settings,
    "versions": check_machine.versions,
    "number_format": check_machine.number_formats,
    "deepspeed": check_machine.launched,
    "problems": check_rewards.problems,
    "output_dir": check_machine.output_dir,
    "layout": check_machine.layout,
    "batch": check_rewards.batch,
    "golds": check_rewards.golds,
    "rewards": check_rewards.rewards,
    "model": check_model.model,
    "adapter": check_model.adapter,
    "trackers": check_services.trackers,
    "hub": check_services.hub,
    "vllm_server": check_services.vllm_server,
    "disk": check_machine.disk,
    "python_tool": check_machine.python_tool,
}
# Only the doctor makes these, because they take seconds or print examples.
DOCTOR_CHECKS: dict[str, Check] = {"gold_answers": check_rewards.examples, "audit": audit.check, "attack": attack.check}
# Checks that are left out after an error: they need settings that can run, and a model and a chat template that work.
AFTER_ALL = ("settings", "adapter", *DOCTOR_CHECKS, "vllm_server", "disk", "end_of_turn", "prompt_lengths", "memory")
# The checks that need the tokenizer, whose package imports torch.
WITH_TOKENIZER: dict[str, Check] = {
    "chat_template": check_model.chat_template,
    "reference": check_model.reference,
    "end_of_turn": check_model.end_of_turn,
    "prompt_lengths": check_model.prompt_lengths,
    "memory": check_machine.memory_plan,
}


def preflight(setup: Setup, only: Collection[str] = tuple(CHECKS), failed: bool = False) -> Iterator[Finding]:
    """Yield the findings of the checks named in ``only``. An error that two checks raise is yielded once.

    ``failed``: there was an error before these checks.
    """
    yielded = set[str]()
    for name, check in {**CHECKS, **DOCTOR_CHECKS, **WITH_TOKENIZER}.items():
        if name not in only or (failed and name in AFTER_ALL):
            continue
        try:
            for finding in check(setup) or ():
                failed |= finding.level == "error"
                yield finding._replace(check=name)
        # Training needs no plan: a model or a setting that the planner does not support is not an error.
        except NotPlanned as error:
            yield as_finding(error, name, "info")
        except UserError as error:
            failed = True
            # Several checks read the same problems, and would report the same error.
            if str(error) not in yielded:
                yielded.add(str(error))
                yield as_finding(error, name)


# Checks that need neither torch nor the number of processes.
EARLY = ("settings", "versions", "number_format", "deepspeed", "problems", "output_dir", "rewards")


def refuse_early(read: Recipe, accelerate: Mapping[str, Any]) -> None:
    """Raise the error that training would end with, if it can be found in a second. Training runs the other checks.

    ``accelerate``: the content of the accelerate config.
    """
    # Not `ask`, which imports torch.
    warning_lines(Setup(read.raise_first_problem(), accelerate=accelerate), EARLY)
