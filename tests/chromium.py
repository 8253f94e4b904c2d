"""A headless Chromium, driven through the DevTools protocol over a pipe: no driver, no web socket, no network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--no-default-browser-check", "--disable-sync"),
    *("--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    "--remote-debugging-pipe",
]
# Chromium reads commands from file descriptor 3 and writes answers to 4.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One Chromium and one tab of it. ``requests`` and ``errors`` are of the page that is open."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        command = [sys.executable, "-c", START, str(theirs_in), str(theirs_out), CHROMIUM, *FLAGS]
        command += [f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.commands, self.answers = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")
        self.number, self.session = 0, None
        self.requests, self.errors, self.loaded = [], [], False
        (tab,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.commands.close()
        self.process.terminate()
        self.process.wait(10)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result; events that come before it are taken in."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while (answer := self._message()).get("id") != self.number:
            self._event(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            assert byte, "Chromium ended"
            message += byte
        return json.loads(message)

    def _event(self, message: dict[str, Any]) -> None:
        method, details = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening", "Log.entryAdded"):
            self.errors.append(str(details))
        elif method == "Page.loadEventFired":
            self.loaded = True

    def open(self, page: Path, width: int = 1200, height: int = 900) -> None:
        """Load a file and wait until its scripts have run."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.requests, self.errors, self.loaded = [], [], False
        self.call("Page.navigate", url=page.as_uri())
        while not self.loaded:
            self._event(self._message())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, evaluated in the page; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")
