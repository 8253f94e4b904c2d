r"""Grade completions: find the answer and compare it with the gold answer. Grading cannot hang.

    where.py            finds the answer of a completion, by position
    equal/              compares two answers, by structure
    workers.py judge.py worker processes with limits, for the comparisons that this process cannot make

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
