"""The checks before a run: settings, problems, rewards, machine and services -> findings, in seconds.

`grpo-math doctor` prints the findings, and training runs the checks before weights load. A new check is a function of
checks/ and a row of `CHECKS`.

>>> from grpo_math.settings.recipe import read
>>> settings = read(["--model_name_or_path", "embedded", "--lora_target_modules", "q_prj", "--use_peft"])
>>> [finding] = preflight(Setup(settings), [Check("adapter", check_model.adapter)])
>>> print(finding.line())
error: lora_target_modules='q_prj' matches no linear map of a layer. Remedy: use all-linear, or ... (adapter)

Imports no torch.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from grpo_math.checks import attack, audit, check_machine, check_model, check_rewards, check_services
from grpo_math.checks.setup import Setup, as_finding
from grpo_math.errors import Finding, UserError
from grpo_math.planner.settings import NotPlanned
from grpo_math.settings import rules
from grpo_math.system.collectives import broadcast_from_main

# When training makes a check: before TRL's settings are made, before torch is imported, before the tokenizer is loaded,
# and with the tokenizer. `grpo-math train` makes the first two itself, in a second, and hands the warnings on.
START, EARLY, MAIN, TOKENIZER = "start", "early", "main", "tokenizer"


class Check(NamedTuple):
    """A check of a run before it starts.

    ``name``: of the check in its findings. ``run`` yields findings without the name, or raises the `UserError` that
    training would end with; one that only raises returns None. ``after_error``: False for a check that needs settings
    that can run, or a model and a chat template that work. ``doctor_only``: training leaves the check out, because the
    check takes seconds or prints examples, or because training does the same itself.
    """

    name: str
    run: Callable[[Setup], Iterable[Finding] | None]
    when: str = MAIN
    after_error: bool = True
    doctor_only: bool = False


def settings(setup: Setup) -> list[Finding]:
    """Settings do not contradict each other, and each has an effect."""
    lines = [as_finding(line, "settings", level) for level, line in rules.violations(setup.settings)]
    # Warnings about settings without effect are left out while there are errors.
    return [line for line in lines if line.level == "error"] or lines


# In this order, because training ends with the first error. Checks that use the network come late.
CHECKS: tuple[Check, ...] = (
    Check("settings", settings, EARLY, after_error=False),
    Check("versions", check_machine.versions, EARLY),
    Check("gpus", check_machine.usable_gpus, EARLY),
    Check("number_format", check_machine.number_formats, EARLY),
    Check("deepspeed", check_machine.launched, START),
    Check("compilers", check_machine.compilers, EARLY),
    Check("compilation", check_machine.compilation, EARLY),
    Check("problems", check_rewards.problems, EARLY),
    Check("output_dir", check_machine.output_dir, EARLY),
    Check("layout", check_machine.layout),
    Check("batch", check_rewards.batch),
    Check("golds", check_rewards.golds),
    Check("rewards", check_rewards.rewards, EARLY),
    Check("model", check_model.model),
    Check("adapter", check_model.adapter, after_error=False),
    Check("trackers", check_services.trackers),
    Check("hub", check_services.hub),
    Check("vllm_server", check_services.vllm_server, after_error=False),
    Check("disk", check_machine.disk, after_error=False),
    Check("versions", check_machine.untested_versions, doctor_only=True),
    Check("gold_answers", check_rewards.examples, after_error=False, doctor_only=True),
    Check("audit", audit.check, after_error=False, doctor_only=True),
    Check("attack", attack.check, after_error=False, doctor_only=True),
    # These import torch. After an error they are left out: the classes of training would raise it again.
    Check("settings", check_model.accepted_by_trl, TOKENIZER, after_error=False, doctor_only=True),
    Check("model", check_model.files, TOKENIZER, after_error=False),
    Check("reference", check_model.reference, TOKENIZER, after_error=False),
    Check("chat_template", check_model.chat_template, TOKENIZER, after_error=False),
    Check("end_of_turn", check_model.end_of_turn, TOKENIZER, after_error=False),
    Check("prompt_lengths", check_model.prompt_lengths, TOKENIZER, after_error=False),
    Check("memory", check_machine.memory_plan, TOKENIZER, after_error=False),
)


def training_checks(*when: str) -> list[Check]:
    """Return the checks that training makes at these times."""
    return [check for check in CHECKS if check.when in when and not check.doctor_only]


def preflight(setup: Setup, checks: Iterable[Check] = CHECKS, failed: bool = False) -> Iterator[Finding]:
    """Yield the findings of checks. An error that two checks raise is yielded once.

    ``failed``: there was an error before these checks.
    """
    yielded = set[str]()
    for check in checks:
        if failed and not check.after_error:
            continue
        try:
            for finding in check.run(setup) or ():
                failed |= finding.level == "error"
                yield finding._replace(check=check.name)
        # Training needs no plan: a model or a setting that the planner does not support is not an error.
        except NotPlanned as error:
            yield as_finding(error, check.name, "info")
        except UserError as error:
            failed = True
            # Several checks read the same problems, and would report the same error.
            if str(error) not in yielded:
                yielded.add(str(error))
                yield as_finding(error, check.name)


def warning_lines(setup: Setup, checks: Iterable[Check]) -> list[str]:
    """Return the lines of the warnings. Raise `UserError` for the first error.

    >>> from grpo_math.settings.recipe import read
    >>> settings = read(["--dataset", "generated:sums", "--per_device_train_batch_size", "8"])
    >>> warning_lines(Setup(settings), [Check("batch", check_rewards.batch)])
    ['warning: a step has 1 prompt, so its gradient is mostly noise. Remedy: prompts_per_step: 16 (batch)']
    >>> warning_lines(Setup(settings), [Check("model", check_model.model)])
    Traceback (most recent call last):
    ...
    grpo_math.errors.UserError: model_name_or_path=None is missing: give a folder, a Hub id, or 'embedded'
    """
    lines = []
    for finding in preflight(setup, checks):
        if finding.level == "error":
            raise UserError(f"{finding.message}: {finding.remedy}")
        if finding.level == "warning":
            lines.append(finding.line())
    return lines


def agree_warning_lines(setup: Setup, checks: Iterable[Check]) -> list[str]:
    """Return the `warning_lines` of the main process, on all ranks."""
    return broadcast_from_main(lambda: warning_lines(setup, checks))
