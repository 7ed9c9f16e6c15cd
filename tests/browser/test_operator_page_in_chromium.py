"""The page of an operator in headless Chromium: from disk, at two widths, in both colour schemes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from chromium import CONTRAST, SCHEMES, WIDTHS, announcement, opened, requests
from torch import Tensor

import opsmith
from opsmith.pages import content
from opsmith.pages.sections import BODIES, ExportResult

pytestmark = pytest.mark.browser


@opsmith.operator("browser_page::affine", shapes="x: B M, weight: N M -> B N")
def affine(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x Wt, <img src=http://example.org/x.png>."""
    return x @ weight.mT


affine.gradients(x=lambda grad, weight: grad @ weight, weight=lambda grad, x: 2 * grad.mT @ x)
affine.kernel("cpu", lambda x, weight: x @ weight.mT, dtypes=[torch.float32])


@affine.samples
def _(make: opsmith.Make) -> Iterator[Any]:
    yield make(4, 3), make(2, 3)


@opsmith.operator("browser_page::bare")
def bare(x: Tensor) -> Tensor:
    return x * x


@opsmith.operator("browser_page::right")
def right(x: Tensor) -> Tensor:
    return x.exp() * x


right.samples(lambda make: [(make(3),)])


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of pages: an index, an operator that is wrong, one that is measured, one without samples."""
    folder = tmp_path_factory.mktemp("pages")
    known = {each.name: opsmith.check(each, effort="quick") for each in (affine, right)}
    measured = {
        right.name: opsmith.benchmark(
            right, effort="quick", compiled=False, memory=False, report=known[right.name]
        )
    }
    exports = (
        ExportResult("function", BODIES["function"], "", 20, {affine.name: 1}, 1e-7, 1e-6, ("a note",)),
        ExportResult("inline", BODIES["inline"], "ExportError: `sort` has no counterpart"),
    )
    with pytest.MonkeyPatch.context() as patch:  # real ones take long, and look alike
        patch.setattr(content, "exports_of", lambda operator: exports)
        index, *others = opsmith.page([affine, right, bare], folder, reports=known, benchmarks=measured)
    named = dict(zip(("wrong", "right", "bare"), others, strict=True))
    return {"index": index.as_uri()} | {name: file.as_uri() for name, file in named.items()}


NAMES = ("index", "wrong", "right", "bare")


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_the_narrowest_of_telephones(browser: Any, pages: dict[str, str], name: str) -> None:
    opened(browser, pages[name], 320)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 320


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_opens_from_disk_fits_and_asks_for_nothing(
    browser: Any, pages: dict[str, str], name: str, width: int, scheme: str
) -> None:
    opened(browser, pages[name], width, scheme)
    assert browser.get_log("browser") == []
    assert requests(browser) == [pages[name]]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_text_stands_out_from_its_ground(
    browser: Any, pages: dict[str, str], name: str, scheme: str
) -> None:
    opened(browser, pages[name], scheme=scheme)
    found = [each for each in browser.execute_script(CONTRAST) if each[1].strip()]
    assert len(found) > 10
    assert found[0][0] >= 4.5, found[0]  # WCAG 2.2, level AA, for small text


def test_the_graph_is_drawn_and_the_pictures_are_seen(browser: Any, pages: dict[str, str]) -> None:
    opened(browser, pages["right"])
    assert browser.execute_script("return document.querySelectorAll('.opsmith-graph .node').length") >= 3
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('.plot svg')].map(each => each.getBoundingClientRect().height)"
    )
    assert len(sizes) == 2
    assert min(sizes) > 100


@pytest.mark.parametrize("name", ["wrong", "right"])
def test_the_keyboard_reaches_what_scrolls(browser: Any, pages: dict[str, str], name: str) -> None:
    opened(browser, pages[name], width=360)
    unreachable = """
    return [...document.querySelectorAll("body *")]
      .filter(element => element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 1)
      .filter(element => ["auto", "scroll"].includes(getComputedStyle(element).overflowX))
      .filter(element => element.tabIndex < 0).map(element => element.outerHTML.slice(0, 80))
    """
    assert browser.execute_script(unreachable) == []


def test_links_lead_from_the_index_to_a_page_and_back(browser: Any, pages: dict[str, str]) -> None:
    opened(browser, pages["index"])
    browser.find_element("link text", "browser_page::affine").click()
    assert browser.current_url == pages["wrong"]
    assert browser.find_element("tag name", "h1").text == "browser_page::affine"
    browser.find_element("link text", "Check").click()
    top = browser.execute_script("return document.getElementById('check').getBoundingClientRect().top")
    assert 0 <= top < 100
    browser.find_element("link text", "All operators").click()
    assert browser.current_url == pages["index"]


def test_what_an_operator_says_is_text(browser: Any, pages: dict[str, str]) -> None:
    opened(browser, pages["wrong"])
    assert browser.execute_script("return document.images.length") == 0
    assert "<img src=http://example.org/x.png>" in browser.find_element("tag name", "main").text


@pytest.mark.parametrize("answer", ["granted", "denied"])
def test_the_script_of_a_failure_is_copied_or_selected_by_its_button(
    browser: Any, pages: dict[str, str], answer: str
) -> None:
    opened(browser, pages["wrong"])
    permission = {"name": "clipboard-write", "allowWithoutSanitization": False}
    browser.execute_cdp_cmd("Browser.setPermission", {"permission": permission, "setting": answer})
    button = browser.find_element("css selector", ".replay button")
    assert button.is_displayed()
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    if answer == "granted":
        assert announcement(browser) == "The lines were copied."
    else:
        assert announcement(browser) == "The lines are selected: copy them with your keys."
        code = browser.find_element("css selector", ".replay pre").text
        assert browser.execute_script("return getSelection().toString()").strip() == code.strip()
