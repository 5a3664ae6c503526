"""A headless Chromium, spoken to in its own language (the DevTools protocol), for tests of Prefect's pages."""

import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

from websockets.sync.client import connect

from support.waiting import wait_until

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
]
OPTIONS += [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
]


class Browser:
    """One page of one browser; within `with`. Elements are found by CSS or by their text, and waited for."""

    def __init__(
        self, width: int = 1280, height: int = 900, scheme: str = "light"
    ) -> None:
        self.width, self.height, self.scheme, self.number = width, height, scheme, 0

    def __enter__(self) -> "Browser":
        assert CHROMIUM, "no Chromium is installed"
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [
            CHROMIUM,
            *OPTIONS,
            f"--user-data-dir={self.profile.name}",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        port_file = Path(self.profile.name, "DevToolsActivePort")
        wait_until(
            lambda: port_file.exists() and port_file.read_text().count("\n"),
            60,
            "the browser did not start",
        )
        port = port_file.read_text().splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            page = next(one for one in json.load(answer) if one["type"] == "page")
        self.socket = connect(page["webSocketDebuggerUrl"], max_size=None, proxy=None)
        size = {
            "width": self.width,
            "height": self.height,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": self.scheme}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()
        self.profile.cleanup()

    def _call(self, method: str, **parameters: object) -> dict:
        self.number += 1
        self.socket.send(
            json.dumps({"id": self.number, "method": method, "params": parameters})
        )
        while True:
            answer = json.loads(self.socket.recv(timeout=60))
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> object:
        """The value of a JavaScript expression."""
        result = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def text(self) -> str:
        """What the page says."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        try:
            wait_until(condition, seconds)
        except AssertionError:
            raise AssertionError(f"{what}; the page:\n{self.text()[:2000]}") from None

    def wait_for(self, words: str, seconds: float = 60) -> None:
        self.wait(
            lambda: words in self.text(), seconds, f"the page never said {words!r}"
        )

    def find(self, css: str, words: str = "") -> str:
        """A JavaScript expression for the innermost such element that holds these words."""
        return (
            f"[...document.querySelectorAll({json.dumps(css)})]"
            f".filter(one => one.textContent.trim().includes({json.dumps(words)}) && one.offsetParent !== null).at(-1)"
        )

    def click(self, css: str, words: str = "", seconds: float = 30) -> None:
        element = self.find(css, words)
        self.wait(
            lambda: self.run(f"!!({element})"), seconds, f"no {css} with {words!r}"
        )
        self.run(f"({element}).click()")

    def fill(self, element: str, value: str) -> None:
        """Types into an input, as its framework sees it."""
        self.run(
            f"(() => {{ const one = {element}; one.focus(); "
            "const kind = one.tagName === 'TEXTAREA' ? HTMLTextAreaElement : HTMLInputElement; "
            f"Object.getOwnPropertyDescriptor(kind.prototype, 'value').set.call(one, {json.dumps(value)}); "
            "one.dispatchEvent(new Event('input', {bubbles: true})); one.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )
