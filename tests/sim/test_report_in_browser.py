"""A report in a real browser, where one is installed: it needs no repair, fetches nothing, fits the width, and prints on A4."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sim.reporting import html_page
from tests.sim.test_report_pages import drawn, whole
from tests.support import pages

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
WIDTHS = (400, 794, 1200)
"""Widths of a telephone, of A4 paper at 96 dots per inch, and of a screen [pixels]."""
HARNESS = """<!DOCTYPE html><html><body><pre id="found"></pre><script>
const found = {}, widths = %s;
function next() {
  if (!widths.length) { document.getElementById("found").textContent = JSON.stringify(found); return; }
  const width = widths.shift(), frame = document.createElement("iframe");
  frame.style.cssText = `border: 0; width: ${width}px; height: 800px`;
  frame.onload = () => {
    const page = frame.contentDocument, view = frame.contentWindow;
    const wide = [...page.querySelectorAll("body *")].filter((each) => {
      if (each.closest(".scroll, pre, nav h2, svg")) return false;
      return each.getBoundingClientRect().right > width + 1;
    });
    found[width] = {
      scrolls: page.documentElement.scrollWidth, wide: wide.map((each) => each.outerHTML.slice(0, 200)),
      fetched: view.performance.getEntriesByType("resource").map((each) => each.name), mode: page.compatMode,
      elements: page.querySelectorAll("*").length, headings: [...page.querySelectorAll("h1, h2")].map((each) => each.textContent),
      drawn: [...page.querySelectorAll("svg")].map((each) => each.getBoundingClientRect().height > 50),
      paper: view.getComputedStyle(page.querySelector(".answer")).backgroundColor,
    };
    next();
  };
  frame.src = "report.html";
  document.body.append(frame);
}
next();
</script></body></html>"""


def browse(folder: Path, *options: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, *OPTIONS, f"--user-data-dir={folder / 'profile'}", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed; on Debian: apt-get install chromium")
def test_a_browser_shows_the_page_and_prints_it(tmp_path: Path) -> None:
    text = "Words of a user: <script>document.title = 'run'</script> and a path" + "/of/long/names" * 20
    page = html_page.render(whole(text, drawn()))
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    (tmp_path / "harness.html").write_text(HARNESS % json.dumps(WIDTHS), encoding="utf-8")
    dumped = browse(tmp_path, "--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path}/harness.html")
    said = re.search(r'<pre id="found">(.*?)</pre>', dumped, flags=re.DOTALL)
    assert said is not None, dumped[:2000]
    found: dict[str, Any] = json.loads(html.unescape(said[1]))
    root = pages.check(page)
    assert {*found} == {str(width) for width in WIDTHS}
    for width, seen in found.items():
        assert seen["mode"] == "CSS1Compat"
        assert seen["elements"] == len([*root.iter()]), "the browser repaired the page"
        assert seen["headings"] == ["".join(each.itertext()) for each in root.iter() if each.tag in ("h1", "h2")]
        assert seen["fetched"] == []
        assert seen["scrolls"] <= int(width), seen["wide"]
        assert seen["wide"] == []
        assert seen["drawn"] == [True, True]
        assert seen["paper"] != "rgba(0, 0, 0, 0)", "the style was not applied"
    browse(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'report.pdf'}", f"file://{tmp_path}/report.html")
    printed = (tmp_path / "report.pdf").read_bytes()
    [size] = {*re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", printed)}
    assert [round(float(each) / 72 * 25.4) for each in size] == [210, 297]
