"""Progress of a test run: the number of tests, a line for each file that is done with the time that is left, and a line
for each failure, instead of a dot for each test.

    ./launch/test.sh --all --junitxml=results.xml && python tests/progress.py results.xml

writes the seconds of the slow tests to tests/seconds.json, which the time that is left and the order of the files need.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

FILE = Path(__file__).with_name("seconds.json")
SLOW, OTHER = 2, 0.03  # seconds of a test that the file contains, and of another one
SECONDS: dict[str, int] = json.loads(FILE.read_text())


def seconds_of(test: str, other: float = OTHER) -> float:
    """Return about how many seconds a test takes in a whole run; ``other`` if it was not measured.

    >>> seconds_of("tests/test_new.py::test_a_new_one")
    0.03
    """
    return SECONDS.get(test, other)


def time_left(elapsed: float, done: float, total: float) -> float:
    """Return about how many seconds a run still takes of which ``done`` of ``total`` expected seconds have ended.

    >>> time_left(60.0, done=30.0, total=40.0)
    20.0
    """
    return elapsed * (total - done) / done


class Progress:
    def __init__(self, config: pytest.Config) -> None:
        self.config, self.started = config, time.monotonic()
        self.left: Counter[str] = Counter()  # tests of each file that have not ended
        self.done = self.total = 0.0  # expected seconds

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.count([item.nodeid for item in session.items])

    def count(self, ids: list[str]) -> None:
        """Count the tests of each file, and print how many there are. Each worker of xdist collects the same ones."""
        if self.total or not ids:
            return
        self.left = Counter(test.partition("::")[0] for test in ids)
        self.total = sum(map(seconds_of, ids))
        self.write(f"{len(ids):,} tests in {len(self.left)} files")

    def write(self, line: str) -> None:
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(line)
        reporter.flush()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self.count(ids)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, ended = report.nodeid.partition("::")[0], report.when == "teardown"
        self.left[file] -= ended
        self.done += ended * seconds_of(report.nodeid)
        if report.failed or (ended and not self.left[file]):
            elapsed = time.monotonic() - self.started
            minutes, seconds = divmod(int(elapsed), 60)
            what = f"failed  {report.nodeid}"
            if not report.failed:
                done = f"{sum(not tests for tests in self.left.values()):3d} of {len(self.left)} files"
                what = f"{done}, about {time_left(elapsed, self.done, self.total) / 60:.0f} min left  {file}"
            self.write(f"{minutes:3d}:{seconds:02d}  {what}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        dot = report.skipped or (report.passed and report.when == "call")
        return (report.outcome, "", "") if dot and not hasattr(report, "wasxfail") else None


def main(*results: str) -> None:
    """Write the seconds of the slow tests of one run or several."""
    slow = {}
    for case in (case for file in results for case in ElementTree.parse(file).getroot().iter("testcase")):
        if (seconds := float(case.get("time") or 0)) >= SLOW:
            slow[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = round(seconds)
    text = json.dumps(dict(sorted(slow.items())), indent=0, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
