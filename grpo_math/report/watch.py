"""A run that is going -> its page, drawn anew until the run has ended; the page reloads itself in the browser.

Does not look into the run's process: the files and the lock of its folder tell.
"""

import time
from collections.abc import Callable
from pathlib import Path

from grpo_math.report.page import ReportFiles, report
from grpo_math.report.progress import progress
from grpo_math.report.run_dir import read_run


def watch(run_dir: str | Path, every: int, tell: Callable[[str], None]) -> ReportFiles:
    """Report every so many seconds, and once more without the reloading when the run has ended, or at Ctrl-C.

    ``tell`` gets a line for each new step. A run that is not going has its page at once.
    """
    said = ""
    try:
        while (run := read_run(run_dir)).going:
            if (words := progress(run).words) != said:
                report(run_dir, reload=every)
                said = words
                tell(words)
            time.sleep(every)
    except KeyboardInterrupt:
        tell("stopped watching: the page is as it is now; the run goes on")
    return report(run_dir)
