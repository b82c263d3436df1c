"""The report in a real browser: what it complains about, what it loads, how it looks."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chromium import BINARY, NO_BINARY, open_chromium
from tampering import Tampered

from pipeline.report.command import write_report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BINARY is None, reason=NO_BINARY)]

PHONE, DESK = 390, 1280
ATTACK = "<script>document.title='hostile'</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with hostile text in it."""
    base = tmp_path_factory.mktemp("report")
    run = Tampered(tiny_run, base / "out")
    run.edit_row(lambda row: row.update(sample_id=ATTACK, source=f"{ATTACK}:1"))
    write_report([run.out], base / "report.html")
    return base / "report.html"


@pytest.fixture(scope="module")
def comparison(tiny_run: Path, nano_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("comparison") / "report.html"
    write_report([tiny_run, nano_run], path)
    return path


async def look(path: Path, shots: Path) -> list[dict[str, Any]]:
    """Load a page at both widths and in both colour schemes; what was seen each time."""
    seen = []
    async with open_chromium() as tab:
        for width in (DESK, PHONE):
            for dark in (False, True):
                await tab.open(path.as_uri(), width=width, dark=dark)
                shot = shots / f"{path.parent.name}-{width}-{'dark' if dark else 'light'}.png"
                await tab.screenshot(shot)
                seen.append(
                    {
                        "dark": dark,
                        "title": await tab.value("document.title"),
                        "overflow": await tab.value(
                            "document.documentElement.scrollWidth - innerWidth"
                        ),
                        "background": await tab.value(
                            "getComputedStyle(document.body).backgroundColor"
                        ),
                        "font": await tab.value("getComputedStyle(document.body).fontFamily"),
                        "charts": await tab.value(
                            "[...document.querySelectorAll('svg.chart')]"
                            ".map(s => [s.clientWidth, s.clientHeight])"
                        ),
                        "small": await tab.value(
                            "Math.min(...[...document.querySelectorAll('svg.chart text')]"
                            ".map(t => t.getBoundingClientRect().height))"
                        ),
                        "images": await tab.value("document.images.length"),
                        "bytes": shot.stat().st_size,
                    }
                )
        seen.append({"pdf": await tab.pdf()})
        seen.append({"complaints": tab.complaints, "requests": set(tab.requests)})
    return seen


@pytest.mark.parametrize("which", ["page", "comparison"])
def test_the_page_loads_without_complaint_at_any_width_and_in_both_colours(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path: Path = request.getfixturevalue(which)
    *views, pdf, heard = asyncio.run(look(path, tmp_path))
    assert heard == {"complaints": [], "requests": {path.as_uri()}}
    assert len(views) == 4
    for view in views:
        assert "hostile" not in view["title"] and view["images"] == 0
        assert view["overflow"] <= 0  # wide tables scroll in their own box
        assert view["font"].startswith("ui-sans-serif")  # so the policy let our style through
        assert view["background"] == ("rgb(16, 20, 19)" if view["dark"] else "rgb(252, 252, 250)")
        assert len(view["charts"]) >= 10
        assert all(width > 200 and height > 80 for width, height in view["charts"])
        assert view["small"] >= 9  # CSS pixels a line of chart text is high
        assert view["bytes"] > 50_000
    assert pdf["pdf"].startswith(b"%PDF") and len(pdf["pdf"]) > 50_000


def test_the_driver_hears_complaints_and_requests(tmp_path: Path) -> None:
    """Guards the other test: a browser that says nothing would let everything pass."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\">"
        "<style>body{color:red}</style><img src=http://127.0.0.1:9/x>"
    )
    noisy = tmp_path / "noisy.html"
    noisy.write_text("<img src=http://127.0.0.1:9/x><script>console.log('hi'); nope()</script>")

    async def heard(path: Path) -> tuple[list[str], list[str]]:
        async with open_chromium() as tab:
            await tab.open(path.as_uri(), width=DESK, dark=False)
            await tab.value("1")
            return tab.complaints, tab.requests

    complaints, _ = asyncio.run(heard(bad))
    assert sum("Content Security Policy" in text for text in complaints) == 2
    complaints, requests = asyncio.run(heard(noisy))
    assert any("'hi'" in text for text in complaints)
    assert any("nope is not defined" in text for text in complaints)
    assert "http://127.0.0.1:9/x" in requests
