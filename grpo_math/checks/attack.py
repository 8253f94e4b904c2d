r"""Measure what the rewards pay for blind guesses, compared with a right answer.

An attack is a form and the answers that it puts into the form. Most attacks are blind guesses: a constant,
a number of the problem, or no answer. Some repeat a formula of the problem. The others offer k candidates, of which
one is the gold answer, at each position equally often. Right answers are written in the same way, in every known form.
The form that is paid most is the measure, and the attacks use that form.

The check fails if an attack gets more than `PAID` of a right answer beyond the share of problems on which the attack
happens to be right, if a repeated formula is paid on more than `HOLE` of the problems, because a policy can learn that,
or if k candidates get more than one guess among them. Only the weighted sum is judged. A slow reward function of the
user is attacked on fewer problems, and a very slow one by fewer attacks.

Does not ask a model, and does not find a hole that none of these texts has.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from statistics import fmean, mode
from typing import Any, NamedTuple

from grpo_math.checks.check_rewards import SURE, gradable, graded, other_answer, summed
from grpo_math.checks.setup import Setup
from grpo_math.errors import Finding, RewardError, escaped
from grpo_math.grading import Verdict
from grpo_math.grading.formats import FORMATS, example_completion
from grpo_math.grading.lexicon import DECIMAL

PROBLEMS = 64
# Problems of a slow reward, the seconds for a completion that make it slow, and those at which attacks are left out.
FEWEST, SLOW, SLOWEST = 4, 0.005, 0.1
PAID, ROUNDING = 0.1, 0.005  # of a right answer's reward
CHANCE, HOLE = 0.02, 0.2  # of the problems: a repeated formula may be the answer on some of them
CANDIDATES = (2, 4)
WORST, SHOWN = 3, 160  # attacks that are printed, and characters of their texts
# Rewards for words of reasoning pay for these words, too.
THOUGHT = "First, I read the problem. Second, I note what is given. Next, I calculate. Finally, it follows"
PLAIN, BOX = "ANSWER", r"\boxed{ANSWER}"
TAG = re.compile(r"</?[A-Za-z_][\w-]*>")
NUMBER = re.compile(DECIMAL)
FORMULA = re.compile(
    r"\$([^$]{1,200})\$|\\\((.{1,200}?)\\\)|\\\[(.{1,200}?)\\\]|((?<!\d)\d+!|\\(?:sqrt|[dt]?frac|binom|gcd|lcm|sum|prod)\S+"
    r"|(?<!\d)\d+(?: ?(?:[-+*/×·÷:^]|mod|plus|minus|times|divided by) ?\d+)+)",
    re.DOTALL,
)
# Ways to repeat a formula: a form, and a pattern of the formula with its replacement.
RESTATED = [
    *((form, "", "") for form in ("ANSWER", "ANSWER = x", "ANSWER = ANSWER", "total = ANSWER", "answer: ANSWER")),
    *((form, "", "") for form in ("(ANSWER)", "|ANSWER|", r"\text{ANSWER}", r"\boxed{ANSWER}", "ANSWER (dollars)")),
    *((PLAIN, r"\+", sign) for sign in ("＋", "plus")),
    *((PLAIN, r"(\d+) ?/ ?(\d+)", ratio) for ratio in (r"\1 : \2", r"\\frac{\1}{\2}")),
    *((PLAIN, r"(\d+)", number) for number in (r"$\1", r"\1 − 0", r"\1/1")),
]
EXAMPLE = {"problem": "48 / 2 + 26"}
REMEDY = (
    "pay for one number ({}a format that asks for one), and pay a format only with a correct answer (rewards: [gated])"
)


class Attack(NamedTuple):
    """A form with ANSWER in place of the answer, and the answers of each problem that are written in the form.

    With ``candidates`` 0 a text is a blind guess. Otherwise it offers this many answers, and one is the gold answer.
    With ``restated`` it repeats a formula of the problem.
    """

    name: str
    form: str
    answers: Callable[[Any], list[str]]
    candidates: int = 0
    restated: bool = False

    def texts(self, rows: Sequence[Any]) -> list[tuple[Any, str]]:
        """Return each text with its problem."""
        return [(row, self.form.replace(PLAIN, answer)) for row in rows for answer in self.answers(row)]

    def example(self, rows: Sequence[Any]) -> str:
        return repr(self.texts(rows)[0][1][:SHOWN])


class Paid(NamedTuple):
    """The share of a right answer's reward that an attack gets, and the most that is allowed.

    ``right``: the share of its answers that are right. ``wrong``: a wrong answer's share. For an attack that repeats a
    formula ``share`` is the share of the problems on which the attack is paid. ``text``: one that was paid.
    """

    name: str
    candidates: int
    restated: bool
    share: float
    right: float
    wrong: float
    allowed: float
    text: str

    def __str__(self) -> str:
        if self.restated:
            share = f"{self.share:.1%} of the problems ({self.name})"
            return f"an answer that repeats the problem is paid on {share}; a wrong answer gets {self.wrong:.0%}"
        author = "an answer with several values" if self.candidates else "a blind guess"
        share = f"{self.share:.0%} of a right answer's reward"
        return f"{author} gets {share} ({self.name}, right on {self.right:.0%})"


class Attacked(NamedTuple):
    """The attacks on rewards, the worst first. The findings: an error for each hole, perhaps a warning, and an info.

    ``attacked``: the rewards and the problems in words. ``left_out``: attacks on a slow reward. ``right``, ``wrong``:
    the reward of a right answer and of a wrong one.
    """

    attacked: str
    findings: list[Finding]
    attacks: list[Paid]
    left_out: int
    rows: int
    right: float
    wrong: float

    def messages(self, level: str) -> list[str]:
        return [one.message for one in self.findings if one.level == level]

    def to_dict(self) -> dict[str, Any]:
        faults, (chance, best) = self.messages("error"), map("".join, map(self.messages, ("warning", "info")))
        words = {
            "attacked": self.attacked,
            "ok": not faults,
            "faults": faults,
            "chance": chance,
            "best": best,
            "remedy": self.findings[0].remedy,
        }
        numbers = {name: getattr(self, name) for name in ("left_out", "rows", "right", "wrong")}
        return {**words, **numbers, "attacks": [one._asdict() for one in self.attacks]}


def check(setup: Setup) -> Iterator[Finding]:
    """Yield one line for `doctor`."""
    # golds() has reported gold answers that cannot be graded.
    if setup.settings.rewards and gradable(setup, 1):
        result = attack(setup)
        bad = "; ".join(result.messages("error") or result.messages("warning"))
        # rewards() has reported rewards that do not pay a right answer more.
        if result.right > result.wrong + SURE:
            best = f"attacked: {result.findings[-1].message}"
            remedy = f"grpo-math attack RECIPE shows the texts; {result.findings[0].remedy}"
            yield Finding("warning", bad, remedy) if bad else Finding("info", best)


def lines(result: Attacked) -> Iterator[str]:
    """Yield the lines of the text output."""
    yield f"attacked: {result.attacked}"
    # The worst of each kind that fails, and then the worst.
    for one in list(dict.fromkeys([*failing(result.attacks), *result.attacks]))[:WORST]:
        share = f"{one.share:5.0%} of a right answer's reward, at most {one.allowed:.0%} is ok"
        yield f"{share}: {one.name} (right on {one.right:.0%})"
        yield f"       {escaped(one.text)[:SHOWN]}"
    yield from [f"warning: {chance}" for chance in result.messages("warning")]
    yield from [f"not ok: {fault}" for fault in result.messages("error")] or [f"ok: {result.findings[-1].message}"]
    yield from [f"left out: {result.left_out} attacks, because the reward is slow"] * bool(result.left_out)
    yield from [f"what to do: {one.remedy}" for one in result.findings[:1] if one.remedy]


def failing(attacks: Sequence[Paid]) -> list[Paid]:
    """Return the worst attack of each kind that is paid too much: a repeated formula must not hide another hole."""
    worst = {one.restated: one for one in reversed(attacks) if one.share > one.allowed}
    return list(worst.values())


def attack(setup: Setup, clock: Callable[[], float] = time.monotonic) -> Attacked:
    """Attack the rewards, and return what `lines` prints. ``clock`` tells if a reward is slow."""
    rows = gradable(setup, PROBLEMS)
    setup.refuse("dataset", not rows, "has no gold answer to attack with", "check the data")
    errors: dict[str, str] = {}
    forms = [Attack(name, form, lambda row: [row["answer"]]) for name, form in forms_by_name(setup).items()]
    # The first call may load something, so the second is measured.
    for _ in range(2):
        started = clock()
        pay(setup, errors, forms[0], rows[:FEWEST])
    seconds = (clock() - started) / min(FEWEST, len(rows))
    # A busy machine does not make the shipped rewards slow.
    seconds *= any(":" in name for name in setup.settings.rewards)
    rows = rows[:FEWEST] if seconds > SLOW else rows

    paid = {one: mean(pay(setup, errors, one, rows)) for one in forms}
    best = max(forms, key=lambda one: paid[one])
    wrong = mean(pay(setup, errors, best._replace(answers=lambda row: [other_answer(row["answer"])]), rows))
    # A wrong answer that costs something, as with rewards of -1 and 1, is the zero.
    top, zero = paid[best], min(0.0, wrong)

    def share(reward: float) -> float:
        return (reward - zero) / (top - zero or 1.0)

    # Not every problem has a number or a formula.
    kinds = (blind(rows, forms, best, setup), restated(best), undecided(best))
    planned = [one for kind in kinds for one in kind if one.texts(rows)]
    some = planned[:: max(1, round(seconds / SLOWEST))]
    attacks = sorted(
        (judged(setup, errors, one, rows, share, max(0.0, share(wrong))) for one in some),
        key=lambda one: one.allowed - one.share,
    )
    chance = [one for one in attacks if one.restated and CHANCE < one.share <= HOLE]
    faults = [
        *[f"no form of a right answer is paid more than a wrong answer, such as {best.example(rows)}"]
        * (top <= wrong + SURE),
        *errors.values(),
        *map(str, failing(attacks)),
    ]
    what_to_do = remedy(setup, rows) if faults or chance else ""
    findings = [
        *(Finding("error", fault, what_to_do) for fault in faults),
        *(Finding("warning", str(one), what_to_do) for one in sorted(chance, key=lambda one: -one.share)[:1]),
        # The best attack without candidates: a guess among candidates may be paid correctly.
        Finding("info", str(min(attacks, key=lambda one: (one.restated, one.candidates, -one.share), default=""))),
    ]
    s = setup.settings
    attacked = f"rewards {', '.join(s.rewards)} on {len(rows)} problems of {s.dataset}, {s.dataset_split}"
    return Attacked(attacked, findings, attacks, len(planned) - len(some), len(rows), top, wrong)


def remedy(setup: Setup, rows: Sequence[Any]) -> str:
    """Return what to do. The reward gsm8k is named only if it pays right answers of this data."""
    answer_format = setup.problems.template.answer_format
    settings = setup.settings.changed(rewards=["gsm8k"], reward_weights=None)
    as_number = replace(setup, recipe=setup.recipe._replace(settings=settings))
    answers = [row["answer"] for row in rows]
    # As the check `rewards` judges a recipe: otherwise each of the two would name the other's rewards.
    right, wrong = (
        sum(filter(None, summed(as_number, rows, [example_completion(text, answer_format) for text in texts])))
        for texts in (answers, [*map(other_answer, answers)])
    )
    pays = right - wrong > SURE and setup.settings.rewards != ["gsm8k"]
    return REMEDY.format("rewards: [gsm8k], or " if pays else "")


def judged(
    setup: Setup,
    errors: dict[str, str],
    one: Attack,
    rows: Sequence[Any],
    share: Callable[[float], float],
    wrong: float,
) -> Paid:
    """Return the result of one attack. ``wrong``: a wrong answer's share."""
    sums, texts = pay(setup, errors, one, rows), one.texts(rows)
    paid = [share(reward or 0.0) > (1 + wrong) / 2 for reward in sums]
    on = sum(paid) / len(rows)
    right = on if one.restated else 1 / one.candidates if one.candidates else right_share(setup, one, rows)
    # One of k candidates is a guess, which is right once in k times and else paid like a wrong answer.
    allowed = HOLE if one.restated else right + ((1 - right) * wrong + ROUNDING if one.candidates else PAID)
    measured, text = on if one.restated else share(mean(sums)), next(compress(texts, paid), texts[0])[1]
    return Paid(one.name, one.candidates, one.restated, measured, right, wrong, allowed, text)


def pay(setup: Setup, errors: dict[str, str], attack: Attack, rows: Sequence[Any]) -> list[float | None]:
    """Return the weighted sum of the rewards for each text. If a reward fails, add a line to ``errors`` instead."""
    pairs = attack.texts(rows)
    # A script's reward function may need TRL's column.
    columns = [{"solution": f"\\boxed{{{row['answer']}}}", **row} for row, _ in pairs]
    try:
        return summed(setup, columns, [text for _, text in pairs]) if pairs else []
    except RewardError as error:
        errors.setdefault(str(error), f"{attack.name}, such as {attack.example(rows)}: {error}")
        return []


def mean(sums: Sequence[float | None]) -> float:
    # TRL leaves a completion without a reward out of its group.
    return fmean([reward for reward in sums if reward is not None] or [0.0])


def right_share(setup: Setup, attack: Attack, rows: Sequence[Any]) -> float:
    """Return the share of an attack's texts whose answer is right."""
    # The grader does not know the tags of a prompt, so each answer is graded in the recipe's format, too.
    known = attack._replace(form=FORMATS[setup.problems.template.answer_format].example)
    written = [list(zip(*one.texts(rows), strict=True)) for one in (attack, known)]
    verdicts = zip(*(graded(setup, some, texts) for some, texts in written), strict=True)
    return fmean(any(grade.verdict is Verdict.CORRECT for grade in both) for both in verdicts)


# The texts


def forms_by_name(setup: Setup) -> dict[str, str]:
    """Return the forms of a completion, with ANSWER in place of the answer. The recipe's form comes first.

    The tags of the prompt make two forms, because a reward function of the user may require them.
    """
    template = setup.problems.template
    examples = {name: FORMATS[name].example for name in (template.answer_format, *FORMATS)}
    tags = list(dict.fromkeys(TAG.findall(str(template.prompt("")))))
    texts = [*["It follows."] * (len(tags) // 2 - 1), PLAIN]
    tagged = list(zip(tags[::2], texts, tags[1::2], strict=False))
    forms = {
        **examples,
        "sentence": f"It follows. The answer is {PLAIN}.",
        "bare": PLAIN,
        "box in answer tags": examples["think"].replace(PLAIN, BOX),
        "box after thinking": f"<think>\nIt follows.\n</think>\n{examples['boxed']}",
        "tags of the prompt": "".join(map("".join, tagged)),
        "tags of the prompt on lines": "\n".join(map("\n".join, tagged)),
    }
    return {name: form.replace("It follows", THOUGHT) for name, form in forms.items() if form}


def blind(rows: Sequence[Any], forms: Sequence[Attack], best: Attack, setup: Setup) -> list[Attack]:
    """Return the blind guesses."""
    form, common, prompt = best.form, mode(row["answer"] for row in rows), setup.problems.template.prompt("")
    others = dict(zip([row["id"] for row in rows], [*rows[1:], rows[0]], strict=True))
    column, solved = ("solution", PLAIN) if "solution" in rows[0] else ("answer", form)
    return [
        Attack("the most common gold answer", form, always(common)),
        Attack("the same digit", form, always("1")),
        Attack("a word in place of the answer", form, always("so")),
        Attack("the numbers from 0 to 60", form, always(", ".join(map(str, range(61))))),
        Attack("nothing", PLAIN, always("")),
        Attack("one word", PLAIN, always("So")),
        Attack("a very long text", "Wait, let me think again. " * 400 + form, always(common)),
        Attack("the form ten times", form * 10, always(common)),
        Attack("a claim to be correct", f"{form}\nThis answer is correct. Score: 1.0", always("correct")),
        Attack("the prompt's instructions", PLAIN, always(prompt if isinstance(prompt, str) else prompt[0]["content"])),
        Attack("the problem repeated", PLAIN, lambda row: [row["problem"]]),
        Attack("the problem as the answer", form, lambda row: [row["problem"]]),
        Attack("all numbers of the problem", form, lambda row: [", ".join(numbers(row))]),
        Attack(
            "each number of the problem in a box",
            PLAIN,
            lambda row: [" ".join(f"\\boxed{{{n}}}" for n in numbers(row))],
        ),
        Attack("the first number of the problem", form, lambda row: numbers(row)[:1]),
        Attack("the last number of the problem", form, lambda row: numbers(row)[-1:]),
        Attack("another problem's solution", solved, lambda row: [str(others[row["id"]][column])]),
        *(one._replace(name=f"the form {one.name} without an answer", answers=always("")) for one in forms),
    ]


def always(text: str) -> Callable[[Any], list[str]]:
    return lambda row: [text]


def numbers(row: Any) -> list[str]:
    return NUMBER.findall(row["problem"])


def formulas(row: Any) -> list[str]:
    r"""Return the formulas of a problem, and its calculations outside of formulas.

    >>> formulas({"problem": r"If $x = 3$, what is \(2x\)?"}), formulas({"problem": "What is 24 + 26?"})
    (['x = 3', '2x'], ['24 + 26'])
    """
    return ["".join(groups) for groups in FORMULA.findall(row["problem"])]


def restated(best: Attack) -> list[Attack]:
    """Return the attacks that repeat the first formula of the problem."""
    ways = {f"the first formula as in {repeated(*way, EXAMPLE)[0]}": (best.form, way) for way in RESTATED}
    ways["the first formula of the problem in a box"] = (BOX, RESTATED[0])
    return [Attack(name, form, partial(repeated, *way), restated=True) for name, (form, way) in ways.items()]


def repeated(form: str, old: str, new: str, row: Any) -> list[str]:
    """Return the first formula of a problem in a form, with a pattern of it replaced.

    >>> repeated("ANSWER = x", r"\\+", "plus", {"problem": "What is 24 + 26?"})
    ['24 plus 26 = x']
    """
    return [form.replace(PLAIN, re.sub(old, new, one)) for one in formulas(row)[:1] if re.search(old, one)]


def undecided(best: Attack) -> list[Attack]:
    """Return the attacks that offer several candidates. The gold answer is at each position equally often."""
    form = best.form
    # The form of the text, the separator of the candidates, and the form of each candidate.
    styles = {
        "in boxes": (PLAIN, " ", BOX),
        "in one answer with or": (form, " or ", PLAIN),
        "in one answer with commas": (form, ", ", PLAIN),
        "in one answer with equal signs": (form, " = ", PLAIN),
        "in the form several times": (PLAIN, "\n", form),
        "in a sentence before the answer": (f"It is {PLAIN}.\n{form.replace(PLAIN, '1')}", " or ", PLAIN),
    }
    return [
        Attack(f"{k} candidates {name}", shape, partial(candidates, k, separator, each), k)
        for k in CANDIDATES
        for name, (shape, separator, each) in styles.items()
    ]


def candidates(k: int, separator: str, form: str, row: Any) -> list[str]:
    """Return ``k`` texts with ``k`` answers. The gold answer is first, second, and so on.

    >>> candidates(3, " or ", "ANSWER", {"answer": "79"})
    ['79 or 81 or 92', '92 or 79 or 81', '81 or 92 or 79']
    """
    answers = [row["answer"]]
    while len(answers) < k:
        answers.append(other_answer(answers[-1]))
    texts = [form.replace(PLAIN, answer) for answer in answers]
    return [separator.join(texts[k - first :] + texts[: k - first]) for first in range(k)]
