"""Progress of a test run: a line for each file that is done, and for each failure, instead of a dot for each test."""

import time
from collections import Counter

import pytest


class Progress:
    def __init__(self, config: pytest.Config) -> None:
        self.config, self.started = config, time.monotonic()
        self.left: Counter[str] = Counter()  # tests of each file that have not ended

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.left = Counter(item.nodeid.partition("::")[0] for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        # Each worker collects the same tests.
        self.left = self.left or Counter(test.partition("::")[0] for test in ids)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.left[file] -= report.when == "teardown"
        ended = report.when == "teardown" and not self.left[file]
        if report.failed or ended:
            minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
            done = f"{sum(not left for left in self.left.values()):3d} of {len(self.left)} files  {file}"
            reporter = self.config.pluginmanager.getplugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(f"{minutes:3d}:{seconds:02d}  {f'failed  {report.nodeid}' if report.failed else done}")
            reporter.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        dot = report.skipped or (report.passed and report.when == "call")
        return (report.outcome, "", "") if dot and not hasattr(report, "wasxfail") else None
