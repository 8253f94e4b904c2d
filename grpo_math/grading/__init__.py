r"""Grade completions: find the answer and compare it with the gold answer. Grading cannot hang.

    where.py            finds the answer of a completion, by position
    equal/              compares two answers, by structure
    workers.py judge.py worker processes with limits, for the comparisons that this process cannot make

No text of a model meets a pattern in this process whose time is not linear in the text: two alternatives of a repeat
never match the same character, and a repeat that need not give back characters is possessive. equal/ reads at most 400
characters here. A worker, which can be killed, reads longer answers. A library with a linear guarantee does not fit:
RE2 lacks the look-behind that finds a word in a script without spaces. tests/grading/test_linear_time.py makes texts
from each pattern on which it could be slow.

`score` and `grade` take one completion, `grade_batch` many. Most answers are decided in this process in microseconds.

>>> str(grade("72", "48 + 24 = 72\n#### 72")), str(grade(r"\frac{1}{2}", "The answer is 0.5."))
('correct', 'correct')
>>> score("The answer is 0.5.", "1/2")
1.0

Does not compute rewards, and does not import sympy or Math-Verify in this process.
"""

from grpo_math.grading.grader import TIMEOUT, grade, grade_batch, score
from grpo_math.grading.verdict import GRADER, Grade, GradingPolicy, Verdict
from grpo_math.grading.workers import shutdown

__all__ = ["GRADER", "TIMEOUT", "Grade", "GradingPolicy", "Verdict", "grade", "grade_batch", "score", "shutdown"]
