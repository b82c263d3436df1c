"""Headless Chromium over its DevTools protocol: load a page, look at it, hear its complaints."""

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

BINARY = shutil.which("chromium") or shutil.which("chromium-browser")
NO_BINARY = "no chromium binary; `make chromium` installs Debian's"


class Page:
    """An open tab. complaints: console messages, exceptions and log entries; requests: URLs."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._last_id = 0
        self._seen: set[str] = set()
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        await self._socket.send_json({"id": self._last_id, "method": method, "params": params})
        while True:
            message = await self._receive()
            if message.get("id") == self._last_id:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json(timeout=60)
        event, params = message.get("method"), message.get("params", {})
        if event == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.complaints.append(str(params))
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        if event is not None:
            self._seen.add(event)
        return message

    async def open(self, url: str, *, width: int, dark: bool) -> None:
        """Load a page anew, `width` CSS pixels wide, and wait until it is there."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1 if width > 500 else 2,
            mobile=width <= 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._seen.discard("Page.loadEventFired")
        await self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._seen:
            await self._receive()

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, by our own hand: the page itself runs none."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def pdf(self) -> bytes:
        return base64.b64decode((await self.call("Page.printToPDF", printBackground=True))["data"])


@contextlib.asynccontextmanager
async def open_chromium() -> AsyncIterator[Page]:
    """A fresh browser with one empty tab; it is gone afterwards, with all it wrote."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [BINARY, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--disable-dev-shm-usage", "--disable-background-networking"]
        command += [f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that all its processes can be ended together
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{port}/json/list"
                async with session.get(url) as answer:
                    tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
                address = tabs[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=2**28) as socket:
                    yield Page(socket)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, f"chromium ended with {process.returncode}"
        if file.is_file() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.1)
    raise TimeoutError("chromium opened no port for its DevTools within a minute")
