"""The report of a real, small ``vmserve bench ab`` in a browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests_browser.chromium import Browser, Page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ab") / "out"
    vmserve = Path(sys.executable).with_name("vmserve")
    options = ["--rounds", "3", "--warmup", "0", "--num-requests", "4", "--max-len", "128"]
    variants = ["--variants", "virtual,paged"]
    command = [str(vmserve), "bench", "ab", *variants, *options, "--output", str(directory)]
    subprocess.run(command, check=True, capture_output=True, timeout=110)
    return directory / "report.html"


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    with browser.page(report.as_uri()) as page:
        yield page


def test_it_opens_with_its_plots(page: Page) -> None:
    sizes = page.run(
        "[...document.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect())"
        ".map(box => [box.width, box.height])"
    )
    assert len(sizes) >= 6
    assert all(width > 100 and height > 50 for width, height in sizes)
    marks = "document.querySelectorAll('svg path, svg polyline, svg line, svg rect').length"
    assert page.run(marks) > 100
    assert page.run("document.querySelectorAll('table').length") >= 2
    for name in ("virtual", "paged"):
        assert name in page.text("body")


def test_it_asks_for_nothing_and_complains_of_nothing(page: Page) -> None:
    assert page.hosts() == {""}  # the file itself
    assert len(page.requested) == 1
    assert page.complaints == []


def test_it_prints(page: Page) -> None:
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") >= 1
    assert len(pdf) > 20_000


def test_it_fits_a_narrow_window(page: Page) -> None:
    page.size(400, 800)
    assert page.run("document.documentElement.scrollWidth") <= 400
