"""Progress of a test run: a line for each file that begins, and for each failure, instead of a dot for each test."""

from __future__ import annotations

import time

import pytest


class Progress:
    def __init__(self, config: pytest.Config) -> None:
        self.config, self.started = config, time.monotonic()
        self.files: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        if report.failed or file not in self.files:
            minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
            reporter = self.config.pluginmanager.getplugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(f"{minutes:3d}:{seconds:02d}  {f'failed  {report.nodeid}' if report.failed else file}")
        self.files.add(file)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        dot = report.skipped or (report.passed and report.when == "call")
        return (report.outcome, "", "") if dot and not hasattr(report, "wasxfail") else None
