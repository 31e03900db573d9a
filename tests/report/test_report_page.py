"""The report page in a real browser, at the width of a desk and of a phone; where there is no browser, that is said."""

import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.small_fit import blobs, run

from hush.accounting import Gaussian
from hush.plan import PrivatePreprocessing
from hush.training import HeldOut

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: the page was not looked at")
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page") / "run"
    name = "records <b>of</b> a study with a rather long name & signs that HTML must not take for its own"
    result = run(
        out=place,
        epochs=4,
        preprocessing=PrivatePreprocessing(name="DP-PCA", event=Gaussian(4.0), run=lambda: Gaussian(4.0)),
        held_out=HeldOut(data=blobs(100, seed=1), public=True),
        name=name,
    )
    assert result.report is not None
    return result.report.html


def browse(page: Path, width: int, *arguments: str) -> str:
    assert BROWSER is not None
    profile = page.parent / f"profile-{width}"
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
        f"--window-size={width},2400", *arguments, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


class Shape(HTMLParser):
    """Which tags a page has, and whether they are closed in the order in which they were opened."""

    EMPTY = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(page: Path) -> None:
    source = page.read_text()
    shape = Shape()
    shape.feed(source)
    assert not shape.open and not shape.links and "script" not in shape.seen
    assert "url(" not in source and "@import" not in source and "http" not in source
    assert shape.seen.count("svg") == 4 and shape.seen.count("h1") == 1
    assert "<b>of</b>" not in source and "&lt;b&gt;of" in source


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_in_a_browser(page: Path, width: int) -> None:
    # A copy that measures itself: the browser runs the layout and writes what it found into the document.
    probe = page.with_name(f"probe-{width}.html")
    script = (
        "<script>addEventListener('load', () => { const d = document.documentElement; const wide = "
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.tagName); const small = [...document.querySelectorAll('svg text')].filter(e => "
        "e.getBoundingClientRect().height < 9).length; d.dataset.found = [innerWidth, d.scrollWidth, wide.length, "
        "small, document.querySelector('h1').getBoundingClientRect().height > 0].join(' '); });</script></head>"
    )
    frame = page.with_name(f"frame-{width}.html")
    probe.write_text(page.read_text().replace("</head>", script))
    # Headless windows have a least width, so the page is laid out inside a frame of the width asked for.
    frame.write_text(
        f"<iframe src='{probe.name}' style='width:{width}px;height:2400px;border:0'></iframe><script>addEventListener("
        "'load', () => { document.documentElement.dataset.inside = "
        "document.querySelector('iframe').contentDocument.documentElement.dataset.found; });</script>"
    )
    document = browse(frame, max(width, 600), "--allow-file-access-from-files", "--dump-dom")
    found = re.search(r'data-inside="([^"]*)"', document)
    assert found is not None, document[:500]
    inner, scroll, wide, small, headline = found.group(1).split()
    assert int(inner) == width and int(scroll) <= width, "no horizontal scrolling"
    assert wide == "0", "nothing reaches over the edge"
    assert small == "0" and headline == "true", "text in pictures stays readable"


@needs_browser
def test_the_page_is_drawn_and_its_words_are_there(page: Path) -> None:
    picture = page.with_name("picture.png")
    document = browse(page, 1280, "--dump-dom")
    for words in ("Privacy report", "differentially private", "Epsilon by epoch", "Accuracy by epoch",
                  "Where the budget went", "Not covered", "DP-PCA", "Head of the chain"):  # fmt: skip
        assert words in document
    browse(page, 1280, f"--screenshot={picture}")
    raw = picture.read_bytes()
    width, height = struct.unpack(">II", raw[16:24])
    assert (width, height) == (1280, 2400) and len(raw) > 50_000, "a page with something on it"
