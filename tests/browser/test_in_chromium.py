"""The page of a check in headless Chromium: it opens from disk, asks for nothing, and says nothing is wrong.

`make test-browser` runs these; pytest alone leaves them out where there is no Chromium, and says so.
"""

from typing import Any

import pytest
from chromium import CONTRAST, SCHEMES, WIDTHS, announcement, opened, requests
from typer.testing import CliRunner

from opsmith.cli.app import app

pytestmark = pytest.mark.browser

OPERATORS = """
import torch, opsmith
from torch import Tensor

@opsmith.operator("browser::right")
def right(x: Tensor) -> Tensor:
    return x * x

right.gradients(x=lambda grad, x: 2 * grad * x)
right.samples(lambda make: [(make(3),)])

@opsmith.operator("browser::wrong")
def wrong(x: Tensor) -> Tensor:
    return x * x

wrong.gradients(x=lambda grad, x: -2 * grad * x)
wrong.samples(lambda make: [(make(4, 5),)])

@opsmith.operator("browser::raising")
def raising(x: Tensor) -> Tensor:
    raise ValueError("<script>document.title = 'taken over'</script><img src=http://example.org/x.png>")

raising.samples(lambda make: [(make(3),)])

@opsmith.operator("browser::bare")
def bare(x: Tensor) -> Tensor:
    return x * x
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a page that the command has written."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "browser_subjects.py").write_text(OPERATORS)
    arguments = ["check", str(folder / "browser_subjects.py"), "--quick", "--html", str(folder / "page.html")]
    done = CliRunner().invoke(app, arguments, prog_name="opsmith")
    assert done.exit_code == 2, done.output
    return (folder / "page.html").as_uri()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_opens_from_disk_without_an_error_or_a_request(
    browser: Any, page: str, width: int, scheme: str
) -> None:
    opened(browser, page, width, scheme)
    assert browser.title == "opsmith check: 4 operators"
    assert browser.get_log("browser") == []
    assert requests(browser) == [page]
    assert browser.execute_script("return document.querySelectorAll('article').length") >= 3


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_sticks_out_at_the_side(browser: Any, page: str, width: int) -> None:
    opened(browser, page, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_text_stands_out_from_its_ground(browser: Any, page: str, scheme: str) -> None:
    opened(browser, page, scheme=scheme)
    found = browser.execute_script(CONTRAST)
    assert len(found) > 50
    assert found[0][0] >= 4.5, found[0]  # WCAG 2.2, level AA, for small text


def test_the_two_schemes_differ(browser: Any, page: str) -> None:
    grounds = []
    for scheme in SCHEMES:
        opened(browser, page, scheme=scheme)
        grounds.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]


def test_what_an_operator_says_takes_nothing_over(browser: Any, page: str) -> None:
    opened(browser, page)
    assert browser.title == "opsmith check: 4 operators"
    assert "<script>document.title = 'taken over'</script>" in browser.find_element("tag name", "main").text
    assert browser.execute_script("return document.images.length") == 0


def test_the_lines_of_a_replay_are_copied_by_a_button(browser: Any, page: str) -> None:
    opened(browser, page)
    button = browser.find_element("css selector", ".replay button")
    assert button.is_displayed()
    granted = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", granted)
    button.click()
    assert announcement(browser) == "The lines were copied."
    read = "navigator.clipboard.readText().then(arguments[0], error => arguments[0]('refused: ' + error))"
    code = browser.find_element("css selector", ".replay pre").text
    assert browser.execute_async_script(read).strip() == code.strip()


def test_the_keyboard_reaches_what_scrolls_and_what_can_be_pressed(browser: Any, page: str) -> None:
    opened(browser, page, width=360)
    unreachable = """
    return [...document.querySelectorAll("pre, button, a")]
      .filter(element => element.scrollWidth > element.clientWidth + 1 && element.tagName === "PRE")
      .filter(element => element.tabIndex < 0).length
    """
    assert browser.execute_script(unreachable) == 0
    size = browser.find_element("css selector", ".replay button").size
    assert min(size["width"], size["height"]) >= 24  # WCAG 2.2: target size
