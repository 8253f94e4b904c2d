"""A run directory -> plots and one self-contained HTML page; two results files -> their paired difference.

`run_dir` reads a run, `plots` draws its history, `viewer` prepares its completions, and `page` (`several` for more than
one run) fills in page.html. `card` fills in card.md, which `hub` pushes. `render` has the templates.

Does not train, evaluate or grade, does not import torch, and loads nothing from the network.
"""

from grpo_math.evaluation.compare import Change, ResultsError, changed, compare, read_results
from grpo_math.report.page import ReportFiles, report
from grpo_math.report.terminal import terminal_changes, terminal_table

__all__ = ["Change", "ReportFiles", "ResultsError", "changed", "compare", "read_results", "report"]
__all__ += ["terminal_changes", "terminal_table"]
