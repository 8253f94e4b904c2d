r"""Texts that name two to four candidates: in one marker, in several, in sentences, in lines, in each format.

Each is graded against each of its candidates as the gold answer. A policy that knows k candidates, one of which is
right, may not be paid more than 1/k: so no text may be paid for two. Candidates have different values: 25% answers 25
and 0.25, and a number without a unit answers all of its units, so that these are not candidates of one problem.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import permutations

from grpo_math.grading import grade_batch

CANDIDATES = [
    *(("5", "6"), ("12", "345"), ("3", "4", "5", "6"), ("10", "100"), ("-3", "3"), ("0", "1"), ("1,000", "2,000")),
    *(
        (r"\frac{1}{2}", r"\frac{1}{3}"),
        ("1/2", "1/3", "1/4"),
        ("0.5", "0.25"),
        (r"\sqrt{2}", r"\sqrt{3}"),
        ("2i", "3i"),
    ),
    *(("x+1", "x-1"), ("n^2", "n^3"), ("x=1", "x=2"), ("x<1", "x<2"), (r"2\pi", r"3\pi"), ("e", r"\pi"), ("x", "y")),
    *(("(1,2)", "(3,4)"), ("[1,2]", "[3,4]"), ("1, 2", "3, 4"), ("A", "B", "C"), ("(A)", "(B)"), ("five", "six")),
    *((r"\text{east}", r"\text{west}"), ("5 cm", "6 cm"), (r"\$5", r"\$6"), ("10%", "20%"), ("12:30", "1:45")),
    *(("ABC", "BCA"), ("2A", "A2"), ("a+b=5", "a+b=6"), ("yes", "no"), (r"\infty", "0"), ("May 5", "May 6")),
]
JOINTS = r"""
,@;@/@|@=@ or @ and @\text{ or }@ \lor @ \vee @ \land @\quad @\ @\,@\\@ & @ \approx @ \neq @ < @ \le @ \to @ \implies @
\iff @ \equiv @ + @ - @ \cdot @ \times @^@_@ \cup @ \cap @ \in @ \mid @ \pm @ \over @ \choose @ \bmod 
@ to @ (or @ ) or (@, maybe @、@，@；@或@ vs @ \ldots @$ or $@$, $@}{@}, {@} or {@~@:@!
""".replace("\n", "").split("@")
WHOLES = [
    *("@", "x = @", "(@)", r"\{@\}", "[@]", r"\text{@}", "either @", "one of @", r"\begin{cases} @ \end{cases}"),
    *(r"\begin{pmatrix} @ \end{pmatrix}", r"x \in \{@\}", r"\max(@)", r"\{x \mid x = @\}", r"\mathbf{@}", "a+b = @"),
]
MARKED = [
    *((r"So it is \boxed{@}.", "boxed"), ("We add.\n#### @", "gsm8k"), ("<answer>@</answer>", "xml")),
    *(("The answer is @.", None), ("$@$", None), ("@", None)),
]
ONES = [
    r"\boxed{@}",
    "<answer>@</answer>",
    "#### @\n",
    "The answer is @.",
    "$@$",
    "It is @.",
    "(a) @",
    "x = @",
    "答案是 @。",
]
BETWEEN = [" ", ", ", " or ", "\n", "\n\n", " and ", " = ", ". Or is it ", ". No, wait: ", "; y = ", " (b) "]


def texts(candidates: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """Yield completions that name all candidates, each with the requested format."""
    for order in (*list(permutations(candidates))[:2], candidates[::-1]):
        for joint in JOINTS:
            for whole in WHOLES:
                inner = whole.replace("@", joint.join(order))
                for number, (marked, answer_format) in enumerate(MARKED):
                    if whole == "@" or number == 0:
                        yield marked.replace("@", inner), answer_format
        for one in ONES:
            for between in BETWEEN:
                text = between.join(one.replace("@", candidate) for candidate in order)
                for answer_format in (None, "gsm8k", "boxed", "xml"):
                    yield text, answer_format
            for other in ONES:
                marks = [mark.replace("@", c) for mark, c in zip((one, other, one, other), order, strict=False)]
                yield " ".join(marks), None


def paid_twice(all_candidates: Iterable[tuple[str, ...]], stride: int = 1) -> tuple[int, list[str]]:
    """Return the number of texts, and those that are paid for more than one candidate."""
    rows = [(candidates, *row) for candidates in all_candidates for row in dict.fromkeys(texts(candidates))][::stride]
    each = [(gold, text, answer_format) for golds, text, answer_format in rows for gold in golds]
    golds, completions, formats = map(list, zip(*each, strict=True))
    grades = grade_batch(golds, completions, answer_format=formats)
    paid = Counter(row[1:] for row, grade in zip(each, grades, strict=True) if grade.verdict == "correct")
    return len(rows), [text for (text, _), times in paid.items() if times > 1]
