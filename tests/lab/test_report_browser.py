"""The report in a real browser: readable, quiet, reachable, labelled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, find_browser, open_browser
from ladders import made_up_ladder
from report_data import LADDER, POWER, PROFILE
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tilewave.device import get_spec, spec_names
from tilewave.lab.power.records import load_power_run
from tilewave.lab.profile.records import load_profile
from tilewave.lab.records import load_ladder
from tilewave.lab.report.page import make_report, render

WIDTHS = (1400, 400)
SCHEMES = (False, True)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The page of all committed records of an H200, and how many pictures it should have."""
    report = make_report(
        load_ladder(LADDER), get_spec("H200"), load_power_run(POWER), load_profile(PROFILE), ["A note."]
    )
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(report, "tilewave report", "0"), encoding="utf-8")
    return path, len(report.drawings)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


# What is wrong with the texts of each picture: too small on the screen, cut off, or over one another.
TEXTS = """
const wrong = [];
for (const svg of document.querySelectorAll("figure svg")) {
  const box = svg.viewBox.baseVal, scale = svg.getBoundingClientRect().width / box.width, seen = [];
  for (const text of svg.querySelectorAll("text")) {
    const b = text.getBBox(), size = parseFloat(getComputedStyle(text).fontSize) * scale;
    const name = svg.parentNode.id + ": " + text.textContent;
    if (size < 9.5) wrong.push(name + " is " + size + " px high");
    if (b.x < -0.5 || b.x + b.width > box.width + 0.5 || b.y < -0.5 || b.y + b.height > box.height + 0.5)
      wrong.push(name + " is cut off");
    for (const [other, o] of seen) {
      const across = Math.min(b.x + b.width, o.x + o.width) - Math.max(b.x, o.x);
      const along = Math.min(b.y + b.height, o.y + o.height) - Math.max(b.y, o.y);
      if (across > 1 && along > 3) wrong.push(name + " lies over " + other);
    }
    seen.push([text.textContent, b]);
  }
}
return wrong;
"""

# The least contrast (WCAG 2) of texts with the page, outside the pictures and of plain texts inside.
CONTRAST = """
const light = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const paper = light(getComputedStyle(document.body).backgroundColor);
const contrast = (colour) => {
  const ink = light(colour);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
};
const found = [];
for (const e of document.querySelectorAll("h1, h2, h3, p, dt, dd, a, figcaption, summary, td, th, output"))
  found.push([contrast(getComputedStyle(e).color), e.tagName]);
for (const e of document.querySelectorAll("svg text:not(.on):not(.onpale)"))
  found.push([contrast(getComputedStyle(e).fill), "text " + e.textContent]);
return found.sort((a, b) => a[0] - b[0])[0];
"""


@pytest.mark.parametrize("dark", SCHEMES, ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_readable(page: tuple[Path, int], browser: Browser, width: int, dark: bool) -> None:
    path, pictures = page
    browser.show(path, width, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    boxes = browser.run(
        "return [...document.querySelectorAll('figure svg')].map(s => [s.getBoundingClientRect().width,"
        " s.getBoundingClientRect().height, s.querySelectorAll('rect, path, circle, line').length])"
    )
    assert len(boxes) == pictures > 40
    assert all(300 < wide <= width and 50 < high < 700 and marks > 4 for wide, high, marks in boxes)
    assert browser.run(TEXTS) == []
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (
        sum(map(int, re.findall(r"\d+", background)[:3])) < 150
        if dark
        else background == "rgb(255, 255, 255)"
    )
    least, where = browser.run(CONTRAST)
    assert least >= 4.5, where
    smallest = browser.run(
        "return Math.min(...[...document.querySelectorAll('p, td, th, dd, dt, figcaption, summary, output')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 12
    assert browser.console() == []


@pytest.mark.long
@pytest.mark.parametrize("device", spec_names())
def test_the_page_of_any_gpu_is_readable(
    browser: Browser, tmp_path: Path, device: str, rng: np.random.Generator
) -> None:
    """Made-up counters, but the pictures that hang on the GPU are the real ones."""
    ladder = made_up_ladder(rng, timed=False, sizes=(1025, 2048, 4096), rungs=23)
    ladder.device = device
    path = tmp_path / "report.html"
    path.write_text(render(make_report(ladder, get_spec(device)), "tilewave report", "0"), encoding="utf-8")
    for width in WIDTHS:
        browser.show(path, width)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run(TEXTS) == []
    assert browser.console() == []


def test_it_asks_nothing_of_any_network(page: tuple[Path, int], browser: Browser) -> None:
    path, _ = page
    browser.requests()
    browser.show(path, 1400)
    asked = [address for address in browser.requests() if not address.startswith("data:")]
    assert asked == [path.as_uri()]
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", path.read_text(encoding="utf-8"))


def test_it_is_small(page: tuple[Path, int]) -> None:
    assert page[0].stat().st_size < 3_000_000


def test_the_keyboard_reaches_every_map(page: tuple[Path, int], browser: Browser) -> None:
    browser.show(page[0], 1400)
    maps = browser.run("return document.querySelectorAll('svg[role=group]').length")
    body = browser.driver.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    assert browser.run("return document.activeElement.getBoundingClientRect().left") >= 0
    stops, told = [], []
    for _ in range(400):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        at = browser.run(
            "const e = document.activeElement, f = e.closest('figure');"
            "return [e.tagName, e.matches('.cell') ? f.id : '',"
            " f ? f.querySelector('output')?.textContent : '']"
        )
        if at[0] == "BODY":
            break
        stops.append(at[0])
        if at[1]:
            told.append(at[1])
            assert re.search(r"lanes? [\d, -]+: byte \d+, bank \d+, pass \d+ of \d+", at[2])
    assert len(told) == len(set(told)) == maps > 0  # one stop a map
    assert stops.count("A") == 8
    assert stops.count("SUMMARY") == browser.run("return document.querySelectorAll('summary').length") > 10


def test_arrows_walk_through_a_map(page: tuple[Path, int], browser: Browser) -> None:
    browser.show(page[0], 1400)
    browser.run("document.querySelector('#banks-08-load-b .cell').focus()")

    def press(key: str) -> dict[str, Any]:
        ActionChains(browser.driver).send_keys(key).perform()
        found: dict[str, Any] = browser.run(
            "const e = document.activeElement;"
            "return {row: +e.dataset.row, column: +e.dataset.column, tab: e.tabIndex, told:"
            " e.closest('figure').querySelector('output').textContent,"
            " stops: e.closest('svg').querySelectorAll('[tabindex=\"0\"]').length}"
        )
        assert found["tab"] == 0
        assert found["stops"] == 1
        assert f"bank {found['column']}, pass {found['row'] + 1} of 8" in found["told"]
        assert "conflict with 1 other word" in found["told"]
        return found

    assert press(Keys.ARROW_RIGHT)["column"] == 1
    assert press(Keys.END)["column"] == 27
    down = press(Keys.ARROW_DOWN)
    assert (down["row"], down["column"]) == (1, 27)
    assert press(Keys.HOME)["column"] == 0
    assert press(Keys.ARROW_LEFT)["column"] == 0
    assert press(Keys.ARROW_UP)["row"] == 0
    assert browser.console() == []


def test_hovering_tells(page: tuple[Path, int], browser: Browser) -> None:
    browser.show(page[0], 1400)
    cell = browser.driver.find_element(
        By.CSS_SELECTOR, "#banks-08-load-b .cell[data-row='1'][data-column='8']"
    )
    browser.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", cell)
    ActionChains(browser.driver).move_to_element(cell).perform()
    output = browser.driver.find_element(By.CSS_SELECTOR, "#banks-08-load-b output")
    assert output.text.startswith("lane 5: byte ")
    assert "bank 8, pass 2 of 8" in output.text
    bar = browser.driver.find_element(By.CSS_SELECTOR, "#throughput-4096 rect")
    browser.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", bar)
    ActionChains(browser.driver).move_to_element(bar).perform()
    told = browser.driver.find_element(By.CSS_SELECTOR, "#throughput-4096 output").text
    assert re.match(r"01 naive: 0\.\d+ TFLOP/s", told)


def test_it_is_labelled(page: tuple[Path, int], browser: Browser) -> None:
    path, pictures = page
    browser.show(path, 1400)
    assert browser.run("return document.documentElement.lang") == "en"
    ids = browser.run("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    svgs = browser.run(
        "return [...document.querySelectorAll('figure svg')].map(s => [s.getAttribute('role'),"
        " s.getAttribute('aria-labelledby').split(' ').map(i => document.getElementById(i).textContent)])"
    )
    assert len(svgs) == pictures
    for role, (title, about) in svgs:
        assert role in ("img", "group")
        assert len(title) > 10
        assert len(about) > 10
    tables = browser.run(
        "return [...document.querySelectorAll('table')].map(t => [t.caption?.textContent.length,"
        " t.querySelectorAll('thead th:not([scope=col])').length, t.querySelectorAll('tbody tr').length -"
        " t.querySelectorAll('tbody th[scope=row]').length])"
    )
    assert len(tables) > 20
    assert all(caption and unscoped == headless == 0 for caption, unscoped, headless in tables)
    levels = browser.run("return [...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    spoken = browser.spoken()
    assert sum(role == "image" for role, _ in spoken) >= pictures - 10
    assert all(name for role, name in spoken if role in ("image", "link", "heading", "table", "region"))
    for landmark in ("banner", "main", "navigation", "contentinfo"):
        assert sum(role == landmark for role, _ in spoken) == 1


def test_a_broken_page_would_be_noticed(page: tuple[Path, int], browser: Browser, tmp_path: Path) -> None:
    text = page[0].read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    image = '<img src="https://example.invalid/x.png" alt=""><div style="width:500px">wide</div></main>'
    text = text.replace("</main>", image, 1).replace('"use strict";', "missing();", 1)
    broken.write_text(
        text.replace('class="rule"', 'class="rule" font-size="3"').replace("11px", "6px"), encoding="utf-8"
    )
    browser.requests()
    browser.show(broken, 400)
    console = browser.console()
    assert any("missing is not defined" in line for line in console)
    assert any("example.invalid" in line for line in console)  # refused by the page's own policy
    assert browser.run("return document.documentElement.scrollWidth") > 400
    assert any("px high" in line for line in browser.run(TEXTS))


def test_no_browser_is_a_named_skip_and_an_error_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/x" if name == "chromium" else None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no chromedriver: apt-get install chromium"):
        find_browser()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no chromedriver"):
        find_browser()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match=r"no browser \(chromium\) and chromedriver"):
        find_browser()
