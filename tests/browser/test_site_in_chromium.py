"""The site of the documentation in headless Chromium: from disk, at two widths, and what its search finds.

`make test-browser` builds the site first.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from chromium import SCHEMES, WIDTHS, opened, requests

pytestmark = pytest.mark.browser

SITE = Path(__file__).parents[2] / "out" / "site"
TERMS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("search_terms.toml").read_text(encoding="utf-8")
)["terms"]
FIRST = 3
"""Hits among which a user looks."""


@pytest.fixture(scope="module")
def site() -> Path:
    if not (SITE / "index.html").exists():
        pytest.fail("there is no site in out/site: run `make test-browser`")
    return SITE


def file_of(address: str) -> Path:
    """The file of an address; a relative path for an address beyond this machine."""
    parts = urlsplit(address)
    return Path(unquote(parts.path)) if parts.scheme == "file" else Path(address)


def pages_of(site: Path, *, every: bool) -> list[Path]:
    """All pages, or one of each folder: the pages of a folder are made alike."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    return pages if every else [*{page.parent: page for page in pages}.values()]


@pytest.mark.parametrize(
    "every", [pytest.param(True, id="all", marks=pytest.mark.slow), pytest.param(False, id="of each folder")]
)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_open_without_an_error_or_a_request_beyond_the_site(
    browser: Any, site: Path, width: int, every: bool
) -> None:
    found: dict[str, object] = {}
    for page in pages_of(site, every=every):
        opened(browser, page.as_uri(), width)
        beyond = [each for each in requests(browser) if not file_of(each).is_relative_to(site)]
        sideways = browser.execute_script("return document.documentElement.scrollWidth") > width
        if browser.get_log("browser") or beyond or sideways or not browser.title:
            found[page.name] = (browser.get_log("browser"), beyond, sideways, browser.title)
    assert found == {}


def test_the_two_schemes_differ(browser: Any, site: Path) -> None:
    grounds = []
    for scheme in SCHEMES:
        opened(browser, (site / "index.html").as_uri(), scheme=scheme)
        grounds.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]


def test_a_block_of_code_has_a_button_that_copies_it(browser: Any, site: Path) -> None:
    opened(browser, (site / "tutorial.html").as_uri())
    granted = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", granted)
    code = browser.find_element("css selector", "pre code").text
    button = wait(browser, lambda: browser.find_element("css selector", "pre ~ * button, pre button"))
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    read = "navigator.clipboard.readText().then(arguments[0], error => arguments[0]('refused: ' + error))"
    assert wait(browser, lambda: browser.execute_async_script(read).strip() == code.strip())


def wait(browser: Any, condition: Any) -> Any:
    from selenium.common.exceptions import NoSuchElementException
    from selenium.webdriver.support.wait import WebDriverWait

    waiting = WebDriverWait(browser, 60, 0.05, ignored_exceptions=[NoSuchElementException])
    return waiting.until(lambda _: condition())


OPEN = """
return [...document.querySelectorAll("*")].some(each => each.shadowRoot?.querySelector("[role=status]"))
"""
"""True once the field of the search is there."""

HITS = """
for (const element of document.querySelectorAll("*")) {
  const shadow = element.shadowRoot;
  const status = shadow && shadow.querySelector("[role=status]");
  if (status && shadow.querySelector("input").value === arguments[0] && status.textContent)
    return [...shadow.querySelectorAll("[role=option]")].map(option => option.href);
}
return null;
"""
"""Addresses of the hits, in their order, once the search has answered."""


def hits(browser: Any, site: Path, term: str) -> list[str]:
    """The pages that the search finds for a term, best first, by their sources."""
    opened(browser, (site / "index.html").as_uri())
    wait(browser, lambda: browser.find_element("css selector", ".md-search__button")).click()
    wait(browser, lambda: browser.execute_script(OPEN))
    browser.execute_cdp_cmd("Input.insertText", {"text": term})  # at once, so that no part of it is answered
    found = wait(browser, lambda: browser.execute_script(HITS, term))
    pages = [file_of(address).relative_to(site).with_suffix(".md").as_posix() for address in found]
    return list(dict.fromkeys(pages))


@pytest.mark.parametrize("term", TERMS)
def test_the_search_finds_what_a_user_looks_for(browser: Any, site: Path, term: str) -> None:
    first = hits(browser, site, term)[:FIRST]
    assert set(first) & set(TERMS[term]), first
