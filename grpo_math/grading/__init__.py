r"""Grade completions: find the answer, compare it with the gold answer, in a way that cannot hang.

    where.py            where the answer of a completion is, by position
    equal/              whether two answers are equal, by structure
    workers.py judge.py who compares what this process cannot: worker processes with limits

`score` and `grade` take one completion, `grade_batch` many. Most answers are decided in this process in microseconds.

>>> str(grade("72", "48 + 24 = 72\n#### 72")), str(grade(r"\frac{1}{2}", "The answer is 0.5."))
('correct', 'correct')
>>> score("The answer is 0.5.", "1/2")
1.0

Does not know about rewards, and does not import sympy or Math-Verify in this process.
"""

from grpo_math.grading.batch import grade, grade_batch, offending, score
from grpo_math.grading.verdict import GRADER, Grade, GradingPolicy, Verdict
from grpo_math.grading.workers import shutdown

__all__ = ["GRADER", "Grade", "GradingPolicy", "Verdict", "grade", "grade_batch", "offending", "score", "shutdown"]
