r"""Completion -> verdict: extract the answer, compare it with the gold, in a way that cannot hang.

`grade` answers for one completion, `grade_batch` for many (batch.py). Most answers are decided in this process in
microseconds (extract.py, compare.py); the rest go to worker processes that are killed when they overrun (pool.py,
worker.py). version.py says which grader this is.

>>> str(grade("72", "48 + 24 = 72\n#### 72")), str(grade(r"\frac{1}{2}", "The answer is 0.5."))
('correct', 'correct')

Does not know about rewards, and does not import sympy or Math-Verify in this process.
"""

from grpo_math.grading.batch import grade, grade_batch, offending
from grpo_math.grading.house import House
from grpo_math.grading.pool import shutdown
from grpo_math.grading.verdict import Grade, Verdict

__all__ = ["Grade", "House", "Verdict", "grade", "grade_batch", "offending", "shutdown"]
