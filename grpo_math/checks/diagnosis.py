"""A run's history -> findings: symptom, numbers and steps, cause, and the line of the recipe that may help.

A line may lack any key, and a value may be None. Lines of a resumed run may repeat steps: the newest attempt counts.

A run without a finding shows none of these symptoms; that does not make it a good run. symptoms.py finds the symptoms.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from grpo_math.checks import symptoms
from grpo_math.checks.series import TREND, WINDOW, RunSeries
from grpo_math.errors import LEVELS, Finding
from grpo_math.run import metrics
from grpo_math.run.history import settled


class Symptom(NamedTuple):
    """The texts of a finding. A message is ``symptom: numbers; cause``, a remedy ``remedy: setting``.

    ``lines``: the lines of the history that the check needs.
    """

    symptom: str
    cause: str
    remedy: str
    level: str = "warning"
    lines: int = 1


# The key is the name of the function in symptoms.py.
CHECKS: dict[str, Symptom] = {
    "flat_reward": Symptom(
        "the reward does not rise",
        "the updates are too small, or the groups contain too little signal",
        "raise the learning rate",
        lines=TREND,
    ),
    "collapse": Symptom(
        "the reward fell after a peak",
        "the policy left the region where its updates improve it",
        "lower the learning rate, or decay it to 0",
        "error",
        lines=WINDOW,
    ),
    "reward_stuck": Symptom(
        "all rewards are the same value",
        "no group differs, so nothing is learned: the problems are too hard or too easy, the completions are cut off, "
        "or the rewards do not depend on the answer",
        "take problems and rewards that differ within a group",
        "error",
        lines=WINDOW,
    ),
    "format_without_accuracy": Symptom(
        "the format is learned and the answers are not",
        "the format is rewarded without a correct answer",
        "reward the format only with a correct answer",
        lines=symptoms.LONG_TREND,
    ),
    "kl_explosion": Symptom(
        "the KL to the reference exploded",
        "the policy writes text to which the reference gives almost no probability",
        "lower the learning rate, or raise beta",
        "error",
        lines=WINDOW,
    ),
    "kl_not_zero_at_start": Symptom(
        "the KL is not zero at the first step",
        "policy and reference are scored differently: dropout is on, or the reference is not the model at the start",
        "turn dropout off",
    ),
    "entropy_collapse": Symptom(
        "the entropy collapsed without a gain",
        "the policy became certain before it became correct, and its completions hardly differ any more",
        "add an entropy bonus, or lower the learning rate",
        lines=TREND,
    ),
    "entropy_rises": Symptom(
        "the entropy rises without a gain",
        "the policy becomes more random: the updates push wrong completions away more than they teach correct ones",
        "lower the learning rate, or remove the entropy bonus",
        lines=TREND,
    ),
    "length_without_accuracy": Symptom(
        "the completions grow and the accuracy does not",
        "something other than a correct answer is rewarded, or long completions keep too little of a penalty",
        "penalize length, and run grpo-math attack on the rewards",
        lines=TREND,
    ),
    "reward_without_heldout": Symptom(
        "the reward rises and held-out accuracy does not",
        "the rewards pay something that does not help to solve other problems",
        "run grpo-math attack on the rewards, and read the completions",
        lines=TREND,
    ),
    "truncation": Symptom(
        "too many completions are cut at the length limit",
        "a completion that is cut off is outside the format, and mostly has no answer",
        "allow longer completions",
    ),
    "none_correct": Symptom(
        "no completion is correct so far",
        "a correct answer that never occurs is never rewarded",
        "read them with grpo-math report, or take easier problems",
    ),
    "eos_mismatch": Symptom(
        "no completion ends by itself",
        "the token with which the model ends its turn is not among the EOS tokens of tokenizer and generation_config",
        "name that token in the model's folder",
        "error",
        lines=WINDOW,
    ),
    "uniform_groups": Symptom(
        "most groups teach nothing, because their rewards are equal",
        "the problems are too easy or too hard for this model, or the rewards too coarse, and a group of equal rewards "
        "has no gradient",
        "take problems and rewards that differ within a group",
        lines=symptoms.FEW,
    ),
    "adapter_not_moving": Symptom(
        "the weights do not move",
        "nothing that is trainable gets a gradient, or the optimizer does not take a step",
        "check which modules are trained, and the learning rate",
        "error",
        lines=WINDOW,
    ),
    "uncheckable_answers": Symptom(
        "the grader cannot check some answers",
        "they are too large or take too long to compute, and are rewarded like wrong answers",
        "read them in the tables of completions; if they are correct, give the grader more time",
        lines=symptoms.FEW,
    ),
    "sampler_apart": Symptom(
        "trainer and sampler disagree on log-probs",
        "vLLM runs older weights (staleness), another precision or another sampling setting (top_p) than the trainer",
        "sample from the whole distribution, score in higher precision, and check that the weight sync works",
        lines=WINDOW,
    ),
    "long_completions_fade": Symptom(
        "long completions lose their gradient",
        "vLLM's log-probs differ from the trainer's, and TRL weights a completion by the product over its tokens",
        "drop a completion by the mean of its tokens' ratios (geometric_mask), or weight each token by its own",
        lines=WINDOW,
    ),
    "heldout_worse": Symptom(
        "held-out accuracy is below the base model's",
        "the model learned what is rewarded on the training problems, not how to solve others",
        "lower the learning rate, or stop earlier",
        "error",
    ),
    "heldout_fell": Symptom(
        "held-out accuracy fell after a peak",
        "later updates unlearned what earlier ones had taught",
        "lower the learning rate, or decay it to 0",
    ),
    "learning_rate_too_high": Symptom(
        "the learning rate is too high",
        "each step changes the policy by more than its rollout can justify",
        "lower it",
        lines=symptoms.FEW,
    ),
}

MOST_PREFIXES = 100  # of a history, that are diagnosed for findings that passed

# A finding is left out if another finding explains it: one line for each cause.
EXPLAINED_BY: dict[str, set[str]] = {
    "flat_reward": {"adapter_not_moving", "reward_stuck", "collapse"},
    "entropy_collapse": {"collapse"},
    "reward_stuck": {"collapse"},
    "uniform_groups": {"reward_stuck", "collapse"},
    "entropy_rises": {"learning_rate_too_high", "collapse", "adapter_not_moving"},
    "reward_without_heldout": {"heldout_worse", "format_without_accuracy"},
    "heldout_fell": {"heldout_worse", "collapse"},
    "length_without_accuracy": {"eos_mismatch", "collapse"},
    "truncation": {"eos_mismatch", "collapse"},
    "none_correct": {"eos_mismatch", "collapse", "reward_stuck", "truncation"},
}


# Findings about what is learned from rewards, or about a KL that starts at 0.
REWARD_CHECKS = (
    "flat_reward",
    "collapse",
    "reward_stuck",
    "entropy_collapse",
    "entropy_rises",
    "reward_without_heldout",
    "none_correct",
    "uniform_groups",
)
REFERENCE_CHECKS = ("kl_explosion", "kl_not_zero_at_start")


def diagnose_whole(
    history: Iterable[Mapping[str, Any]], config: Mapping[str, Any], checkpoints: Iterable[str] = ()
) -> list[Finding]:
    """Return the findings at the end of a history, and as warnings those that passed.

    A finding that passed has the numbers of the middle of the lines that show it.

    >>> lines = [{"step": i, "completions/clipped_ratio": 0.6 if i < 20 else 0.1} for i in range(1, 60)]
    >>> [passed] = diagnose_whole(lines, {})
    >>> passed.level, passed.message[-36:]
    ('warning', '(found at step 1, passed by step 25)')
    """
    lines, checkpoints = settled(history), [*checkpoints]
    now = diagnose(lines, config, checkpoints)
    shown: dict[str, list[tuple[int, Finding]]] = {}
    passed: dict[str, int] = {}
    for end in range(1, len(lines), max(1, -(-len(lines) // MOST_PREFIXES))):
        step = lines[end - 1][metrics.STEP]
        findings = {finding.check: finding for finding in diagnose(lines[:end], config, checkpoints)}
        for name, finding in findings.items():
            shown.setdefault(name, []).append((step, finding))
            passed.pop(name, None)
        for name in shown.keys() - findings.keys():
            passed.setdefault(name, step)
    last = lines[-1][metrics.STEP] if lines else 0
    known = {finding.check for finding in now}
    for name, all_shown in shown.items():
        if name not in known and not EXPLAINED_BY.get(name, set()) & (known | shown.keys()):
            finding = all_shown[len(all_shown) // 2][1]
            when = f"found at step {all_shown[0][0]:g}, passed by step {passed.get(name, last):g}"
            now.append(finding._replace(level="warning", message=f"{finding.message} ({when})"))
    return sorted(now, key=lambda finding: LEVELS.index(finding.level))


def diagnose(
    history: Iterable[Mapping[str, Any]], config: Mapping[str, Any] | None = None, checkpoints: Iterable[str] = ()
) -> list[Finding]:
    """Return the findings of a history (lines of history.jsonl) with the settings of config.yaml, worst level first.

    A held-out line of step 0 contains the base model's accuracy. An absent setting has TRL's default.
    ``checkpoints`` names the folders (``checkpoint-20``) to return to after a collapse.

    >>> diagnose([{"step": 1, "reward": 0.5}])  # too few lines for a finding
    []
    >>> lines = [{"step": i, "completions/clipped_ratio": 0.31} for i in range(1, 31)]
    >>> [finding] = diagnose(lines, {"max_completion_length": 256})
    >>> finding.message
    'too many completions are cut at the length limit: 31% in steps 21 to 30; a completion that is cut off ...'
    >>> finding.remedy
    'allow longer completions: max_completion_length: 512'
    """
    run = RunSeries(history, config or {}, checkpoints)
    # On-policy distillation has no rewards, and the KL to a teacher is not 0 at the start.
    skipped = {*REWARD_CHECKS} if run.get("rewards", ["accuracy"]) == [] else set()
    skipped |= {*REFERENCE_CHECKS} if run.get("reference_model", None) else set()
    names = [name for name in CHECKS if name not in skipped]
    seen: dict[str, symptoms.Symptom] = {name: symptom for name in names if (symptom := getattr(symptoms, name)(run))}
    findings = []
    for name, (words, setting) in seen.items():
        if not EXPLAINED_BY.get(name, set()) & seen.keys():
            check = CHECKS[name]
            message = f"{check.symptom}: {words}; {check.cause}"
            findings.append(Finding(check.level, message, f"{check.remedy}: {setting}", name))
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))
