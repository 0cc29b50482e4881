"""A real Chromium, driven headless. Without one, or without its driver (extra ``browser``), these tests skip with a word."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    pytest.importorskip("plotly", reason="no charting script: pip install plotly")
    driver = pytest.importorskip("playwright.sync_api", reason="no browser driver: pip install '.[browser]'")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium, or name one in CHROMIUM")
    with driver.sync_playwright() as playwright:
        # A container's root may not have the sandbox's namespaces; the pages are this test's own.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


CUT = r"""() => {
  const said = (e) => `${e.tagName} ${e.getAttribute("class") || ""} “${e.textContent.trim().slice(0, 60)}”`, cut = [];
  for (const e of document.body.querySelectorAll("*")) {
    if (e.closest("script, style, select, svg, .skip") || !e.textContent.trim() || !e.clientWidth) continue;
    if (e.scrollWidth > e.clientWidth + 1) cut.push(`${said(e)}: ${e.scrollWidth} px in ${e.clientWidth}`);
  }
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || e.closest("script, style, select, .skip")) continue;
    const room = (e.closest(".chart") || document.documentElement).getBoundingClientRect();
    range.selectNodeContents(texts.currentNode);
    for (const at of range.getClientRects())
      if (at.width && (at.left < room.left - 1 || at.right > room.right + 1))
        cut.push(`${said(e)}: ${at.left} to ${at.right} in ${room.left} to ${room.right}`);
  }
  return cut;
}"""
"""Elements that are wider than their room, and text of the page or of a chart that reaches out of it."""


class Page:
    """One open page, whose errors fail the test."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, view: str) -> Page:
        """Go to a view, and wait until it is drawn, charts in sight included."""
        self.page.goto(f"{self.address}#/{view}")
        self.address = self.page.url.partition("#")[0]  # a token in it was taken off: now only the view changes
        name = view.split("/")[0]
        self.page.wait_for_selector(f'main [data-view="{name}"][data-ready="1"]', timeout=30_000)
        return self

    def text(self, selector: str = "main") -> str:
        return " ".join(self.page.inner_text(selector).replace("\u202f", " ").split())

    def cut_text(self) -> list[str]:
        """Text of this view that is not seen whole at the page's width, every chart drawn."""
        size = self.page.viewport_size
        for _ in range(2):  # charts are drawn once they are in sight, and bring their legends
            height = self.page.evaluate("document.documentElement.scrollHeight")
            self.page.set_viewport_size({**size, "height": height})
            for chart in self.page.locator(".chart").all():
                chart.and_(self.page.locator("[data-drawn]")).wait_for(timeout=30_000)
        cut: list[str] = self.page.evaluate(CUT)
        self.page.set_viewport_size(size)
        return cut

    def rows(self, heading: str) -> list[list[str]]:
        """Cells of the table in the panel of that heading."""
        table = (
            self.page.locator("section.panel", has=self.page.get_by_role("heading", name=heading))
            .locator("table")
            .first
        )
        return [
            [cell.strip() for cell in row.replace("\u202f", " ").split("\t")]
            for row in table.locator("tbody tr").all_inner_texts()
        ]

    def tile(self, label: str) -> str:
        """The value of the tile with that label."""
        tile = self.page.locator(".tile", has=self.page.locator("span", has_text=label)).locator("b").first
        return str(tile.inner_text()).replace("\u202f", " ")

    def chart(self, heading: str) -> list[dict[str, Any]]:
        """x and y of each trace of the chart in the panel of that heading, once it is drawn."""
        chart = (
            self.page.locator("section.panel", has=self.page.get_by_role("heading", name=heading, exact=True))
            .locator(".chart")
            .first
        )
        chart.scroll_into_view_if_needed()
        chart.locator("xpath=self::*[@data-drawn]").wait_for(timeout=30_000)
        plain = "node => node.data.map(t => ({name: t.name, x: Array.from(t.x), y: Array.from(t.y || [])}))"
        return chart.evaluate(plain)


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Page]]:
    contexts = []

    def opened(address: Path | str, *, width: int = 1280, theme: str = "light") -> Page:
        context = chromium.new_context(viewport={"width": width, "height": 860}, color_scheme=theme)
        contexts.append(context)
        return Page(context.new_page(), address.as_uri() if isinstance(address, Path) else address)

    yield opened
    for context in contexts:
        context.close()
