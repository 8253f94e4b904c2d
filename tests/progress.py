"""Progress of a test run: the number of tests, a line for each file that is done with the time that is left, and a line
for each failure, instead of a dot for each test."""

import time
from collections import Counter
from collections.abc import Mapping

import pytest

# Seconds of a test, about: of any, and more for each mark in its file. Only their ratios matter.
SECONDS = {"def test": 0.3, "mark.slow": 3.0, "mark.full": 8.0}


def time_left(elapsed: float, tests: Mapping[str, int], left: Mapping[str, int], seconds: Mapping[str, float]) -> float:
    """Return about how many seconds the other tests take, if they are as slow as those that are done.

    >>> time_left(60.0, {"slow": 2, "quick": 2}, {"slow": 0, "quick": 2}, {"slow": 30.0, "quick": 10.0})
    20.0
    """
    other = sum(seconds[file] * left[file] / tests[file] for file in tests)
    done = sum(seconds.values()) - other
    return elapsed * other / done


class Progress:
    def __init__(self, config: pytest.Config) -> None:
        self.config, self.started = config, time.monotonic()
        self.tests: dict[str, int] = {}
        self.left: Counter[str] = Counter()  # tests of each file that have not ended
        self.seconds: dict[str, float] = {}  # of each file, about

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.count([item.nodeid for item in session.items])

    def count(self, ids: list[str]) -> None:
        """Count the tests of each file, and print how many there are. Each worker of xdist collects the same ones."""
        if self.tests or not ids:
            return
        self.left = Counter(test.partition("::")[0] for test in ids)
        self.tests = dict(self.left)
        # Without the marks of the tests, which the workers do not send.
        for file, tests in self.tests.items():
            text = (self.config.rootpath / file).read_text(encoding="utf-8")
            marked = sum(SECONDS[word] * text.count(word) for word in ("mark.slow", "mark.full"))
            self.seconds[file] = SECONDS["def test"] * tests + marked
        self.write(f"{len(ids):,} tests in {len(self.tests)} files")

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
        file = report.nodeid.partition("::")[0]
        self.left[file] -= report.when == "teardown"
        ended = report.when == "teardown" and not self.left[file]
        if report.failed or ended:
            elapsed = time.monotonic() - self.started
            minutes, seconds = divmod(int(elapsed), 60)
            what = f"failed  {report.nodeid}"
            if not report.failed:
                left = time_left(elapsed, self.tests, self.left, self.seconds) / 60
                done = f"{sum(not tests for tests in self.left.values()):3d} of {len(self.left)} files"
                what = f"{done}, about {left:.0f} min left  {file}"
            self.write(f"{minutes:3d}:{seconds:02d}  {what}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        dot = report.skipped or (report.passed and report.when == "call")
        return (report.outcome, "", "") if dot and not hasattr(report, "wasxfail") else None
