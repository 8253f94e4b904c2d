"""A run directory -> plots and one self-contained HTML page; several runs -> a table; a finished run -> the Hub.

`run_dir` reads a run, `plots` draws its history, `viewer` prepares its completions, and `page` fills in page.html.
`card` fills in card.md, which `hub` pushes. `render` has the templates.

Imports no torch, and loads nothing from the network.
"""

from grpo_math.report.page import ReportFiles, report

__all__ = ["ReportFiles", "report"]
