"""Progress of a test run: one line for each file that is done, and for each failure, instead of a dot for each test."""

from __future__ import annotations

import time
from collections import Counter

import pytest


class Progress:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left: Counter[str] = Counter()  # tests of each file that have not ended
        self.tests: Counter[str] = Counter()
        self.started = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        if not self.tests:  # each worker collects the same tests
            self._begin(ids)

    def _begin(self, ids: list[str]) -> None:
        self.tests = Counter(test.partition("::")[0] for test in ids)
        self.left = self.tests.copy()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(f"failed  {report.nodeid}")
        file = report.nodeid.partition("::")[0]
        if report.when != "teardown" or file not in self.left:
            return
        self.left[file] -= 1
        if self.left[file]:
            return
        del self.left[file]
        done = len(self.tests) - len(self.left)
        self._write(f"{done:3d} of {len(self.tests)} files  {file} ({self.tests[file]})")

    def _write(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(f"{minutes:3d}:{seconds:02d}  {text}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            return "passed", "", ""
        return ("skipped", "", "") if report.skipped and not hasattr(report, "wasxfail") else None
