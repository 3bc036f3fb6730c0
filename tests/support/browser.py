"""A headless Chromium, driven through its debugging pipe: no driver, no port, nothing to install beside the browser."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
_PATIENCE_SECONDS = 30.0
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
_MESSAGES = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


class Tab:
    """One page. `messages`: of the console since it was opened; `requests`: addresses that it asked for, itself included."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._buffer, self._number, self._session = to, back, b"", 0, ""
        self._loaded = False
        self.messages: list[Any] = []
        self.requests: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Loads a file in a window of `width` pixels, as a phone where it is narrow, in the `light` or `dark` scheme."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.messages, self.requests, self._loaded = [], [], False
        self._ask("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._keep(self._receive())

    def value(self, expression: str) -> Any:
        """Of JavaScript in the page; plain data."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        asked |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self._keep(answer)

    def _keep(self, event: dict[str, Any]) -> None:
        name = event.get("method")
        self._loaded = self._loaded or name == "Page.loadEventFired"
        self.messages += [event["params"]] if name in _MESSAGES else []
        self.requests += [event["params"]["request"]["url"]] if name == "Network.requestWillBeSent" else []

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser has not answered for {_PATIENCE_SECONDS:.0f} s"
            read = os.read(self._back, 1 << 16)
            assert read, "the browser has ended"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A browser with its profile in `folder`, and all its processes ended at the end. Its pipe is file numbers 3 and 4."""
    asked, to = _pipe()
    back, answered = _pipe()
    start = ["bash", "-c", f'exec "$@" 3<&{asked} 4>&{answered}', "bash", str(BROWSER), *_FLAGS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(start, pass_fds=(asked, answered), stderr=subprocess.DEVNULL, start_new_session=True)
    os.close(asked)
    os.close(answered)
    try:
        yield Tab(to, back)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to)
        os.close(back)


def _pipe() -> tuple[int, int]:
    """Both ends under high numbers, so that neither is in the way of 3 and 4."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return high[0], high[1]
