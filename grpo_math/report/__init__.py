"""A run directory -> plots and one self-contained HTML page; two results files -> their paired difference.

`terminal` shows two results as a table, `run_dir` reads a run, `plots` draws its history, `memory` its plan, `viewer`
says what the viewer of completions shows, and `page` puts all of it together, with page.html, page.css, page.js and
math.js (LaTeX to MathML, in the browser).

Does not train, evaluate or grade, does not import torch, and loads nothing from the network.
"""

from grpo_math.evaluation.compare import Change, ResultsError, changed, compare, read_results
from grpo_math.report.page import ReportFiles, report
from grpo_math.report.terminal import terminal_changes, terminal_table

__all__ = ["Change", "ReportFiles", "ResultsError", "changed", "compare", "read_results", "report"]
__all__ += ["terminal_changes", "terminal_table"]
