"""Write the page of a run again and again until the run has ended. The page reloads itself in the browser.

Does not look into the run's process: the files and the lock of its folder are enough.
"""

import sys
import time
from pathlib import Path

from grpo_math.report.page import ReportFiles, report
from grpo_math.report.progress import progress
from grpo_math.report.run_dir import read_run


def watch(run_dir: str | Path, seconds: int) -> ReportFiles:
    """Report each new step, and once more without the reloading when the run has ended, or at Ctrl-C."""
    latest = ""
    try:
        while (run := read_run(run_dir)).going:
            if (words := progress(run).words) != latest:
                report(run_dir, reload=seconds)
                latest = words
                print(words, file=sys.stderr)
            time.sleep(seconds)
    except KeyboardInterrupt:
        print("stopped watching; the run continues", file=sys.stderr)
    return report(run_dir)
