"""The page of a graph in headless Chromium: it opens from disk, asks for nothing, and does what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chromium import CONTRAST, SCHEMES, WIDTHS, opened, requests

import opsmith

pytestmark = pytest.mark.browser


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = opsmith.ops.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.relu(self.norm(self.layer(x))) + x
        return result


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("graph") / "network.html"
    network = torch.nn.Sequential(*(Block() for _ in range(12)))
    opsmith.draw(network, path, inputs=torch.rand(3, 4), training=True, title="twelve <b>blocks</b>")
    return path.as_uri()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("graph") / "linear.html"
    opsmith.draw(opsmith.ops.linear, path)
    return path.as_uri()


def drawn(browser: Any) -> list[str]:
    """Text of the visible nodes."""
    nodes = "[...document.querySelectorAll('.node[data-id]')]"
    found: list[str] = browser.execute_script(f"return {nodes}.map(g => g.querySelector('text').textContent)")
    return found


def click(browser: Any, selector: str) -> None:
    browser.find_element("css selector", selector).click()


def beside(browser: Any) -> str:
    text: str = browser.find_element("css selector", "aside").text
    return text


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_opens_from_disk_without_an_error_or_a_request(
    browser: Any, page: str, width: int, scheme: str, tmp_path: Path
) -> None:
    opened(browser, page, width, scheme)
    assert browser.title == "twelve <b>blocks</b>"
    assert browser.get_log("browser") == []
    assert requests(browser) == [page]
    assert len(drawn(browser)) > 12
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return document.documentElement.scrollHeight") <= 800
    picture = tmp_path / "page.png"
    assert browser.save_screenshot(str(picture))
    assert picture.stat().st_size > 10_000


def test_in_a_frame_that_gets_its_size_later_the_graph_is_in_the_middle(browser: Any, tmp_path: Path) -> None:
    shown = opsmith.draw(opsmith.ops.exp)._repr_html_()
    (tmp_path / "notebook.html").write_text(f'<!doctype html><div style="width: 0">{shown}</div>')
    opened(browser, (tmp_path / "notebook.html").as_uri())
    browser.execute_script("document.querySelector('div').style.width = '800px'")
    browser.switch_to.frame(0)
    try:
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        left, right, width = browser.execute_script(
            "const box = document.querySelector('.scene').getBoundingClientRect();"
            "return [box.left, box.right, document.querySelector('.canvas').clientWidth]"
        )
    finally:
        browser.switch_to.default_content()
    assert left > 0
    assert (left + right) / 2 == pytest.approx(width / 2, abs=2)


def test_modules_fold_and_unfold(browser: Any, page: str) -> None:
    opened(browser, page)
    click(browser, "[data-do=fold]")
    assert sorted(drawn(browser)) == sorted([*map(str, range(12)), "input", "output"])
    first = browser.find_element("css selector", ".node.module .toggle")
    browser.execute_script("arguments[0].scrollIntoView()", first)
    first.click()
    unfolded = drawn(browser)
    assert {"0.layer", "0.norm", "ReluBackward0", "AddBackward0"} <= set(unfolded)
    assert "0" not in unfolded
    click(browser, ".group .toggle")
    assert "0.layer" not in drawn(browser)
    click(browser, "[data-do=unfold]")
    assert drawn(browser).count("opsmith::linear") == 12


IN_SIGHT = """
const within = document.querySelector(".canvas").getBoundingClientRect();
return [...document.querySelectorAll(".node.module[data-id]")].find(node => {
  const box = node.getBoundingClientRect();
  const across = box.left > within.left && box.right < within.right;
  return across && box.top > within.top && box.bottom < within.bottom;
});
"""


def test_a_double_click_unfolds_a_module(browser: Any, page: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    opened(browser, page)
    click(browser, "[data-do=fold]")
    before = drawn(browser)
    ActionChains(browser).double_click(browser.execute_script(IN_SIGHT)).perform()
    assert len(drawn(browser)) > len(before)


def test_nothing_lies_on_anything_else(browser: Any, page: str) -> None:
    opened(browser, page)
    click(browser, "[data-do=unfold]")
    overlapping = """
    const shapes = [...document.querySelectorAll(".node[data-id] .shape:first-child")];
    const boxes = shapes.map(shape => shape.getBoundingClientRect());
    const apart = (a, b) => a.right - 1 <= b.left || a.bottom - 1 <= b.top;
    const pairs = boxes.flatMap((a, at) => boxes.slice(at + 1).map(b => [a, b]));
    const found = pairs.filter(([a, b]) => !apart(a, b) && !apart(b, a)).length;
    return [boxes.length, found];
    """
    count, found = browser.execute_script(overlapping)
    assert count > 150
    assert found == 0


def test_text_fits_its_node(browser: Any, page: str) -> None:
    opened(browser, page)
    click(browser, "[data-do=unfold]")
    wider = """
    return [...document.querySelectorAll(".node[data-id]")].filter(g => {
      const box = g.querySelector(".shape").getBBox();
      return [...g.querySelectorAll(":scope > text")].some(text => text.getBBox().width > box.width);
    }).length
    """
    assert browser.execute_script(wider) == 0


def test_the_search_finds_what_is_folded_and_unfolds_it(browser: Any, page: str) -> None:
    opened(browser, page)
    click(browser, "[data-do=fold]")
    search = browser.find_element("css selector", "input[type=search]")
    search.send_keys("7.norm weight")
    assert beside(browser).splitlines()[0] == "2 found"  # the parameter, and who saves it
    search.send_keys("\n")
    assert "7.norm.weight" in drawn(browser)
    assert beside(browser).splitlines()[0] == "7.norm.weight"
    assert "[4] float32" in beside(browser)
    search.clear()
    search.send_keys("no such thing")
    assert beside(browser).splitlines()[0] == "0 found"


def test_a_click_tells_of_a_node_and_lights_up_what_it_hangs_on(browser: Any, small: str) -> None:
    opened(browser, small)
    node = next(
        each
        for each in browser.find_elements("css selector", ".node.operation")
        if each.find_element("css selector", "text").text == "mT"
    )
    node.click()
    told = beside(browser)
    assert told.splitlines()[0] == "mT"
    assert "[3, 2] float32" in told
    assert "linear.py:" in told
    assert "1 ancestors, 3 descendants" in told
    assert len(browser.find_elements("css selector", ".node.faint")) > 5
    assert len(browser.find_elements("css selector", ".chosen")) == 1
    node.click()
    assert browser.find_elements("css selector", ".faint") == []


def test_what_is_saved_is_told(browser: Any, page: str) -> None:
    opened(browser, page)
    assert "Keep the most memory" in beside(browser)
    click(browser, "aside li button")
    assert "Saved for the backward" in beside(browser)
    assert "that only the graph keeps" in beside(browser)


def test_the_keyboard_goes_along_edges(browser: Any, small: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    opened(browser, small)

    def press(*keys: str) -> str:
        for key in keys:
            ActionChains(browser).send_keys(key).perform()
        return str(browser.find_element("css selector", "[role=status]").get_attribute("textContent"))

    browser.execute_script("document.querySelector('.canvas svg').focus()")
    first = browser.execute_script("return document.querySelector('.here title').textContent")
    assert first.splitlines()[0] in ("x", "weight", "bias")
    assert press(Keys.ARROW_DOWN).split(", ")[0] in ("mT", "matmul", "add", "weight", "x")
    press(Keys.ENTER)
    assert len(browser.find_elements("css selector", ".chosen")) == 1
    groups = len(browser.find_elements("css selector", ".group"))
    press(Keys.ESCAPE, "f")
    assert len(browser.find_elements("css selector", ".group")) < groups
    assert browser.get_log("browser") == []


def test_it_is_moved_and_zoomed(browser: Any, page: str) -> None:
    opened(browser, page)
    scene = "return document.querySelector('.scene').getAttribute('transform')"
    before = browser.execute_script(scene)
    click(browser, "[data-do=in]")
    after = browser.execute_script(scene)
    assert before != after
    click(browser, "[data-do=fit]")
    inside = """
    const bounds = name => document.querySelector(name).getBoundingClientRect();
    const [all, box] = [".scene", ".canvas"].map(bounds);
    const beside = all.left >= box.left - 1 && all.right <= box.right + 1;
    return beside && all.top >= box.top - 1 && all.bottom <= box.bottom + 1;
    """
    assert browser.execute_script(inside)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_text_stands_out_from_its_ground(browser: Any, page: str, small: str, scheme: str) -> None:
    for address in (page, small):
        opened(browser, address, scheme=scheme)
        found = browser.execute_script(CONTRAST)
        texts = [each for each in found if each[1]]
        assert len(texts) > 10
        assert texts[0][0] >= 4.5, texts[0]
        assert browser.execute_script(ON_NODES) >= 4.5


ON_NODES = """
const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const luminance = text => {
  const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(channel);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
return Math.min(...[...document.querySelectorAll(".node[data-id]")].map(g => {
  const fill = name => luminance(getComputedStyle(g.querySelector(name)).fill);
  const [a, b] = [".shape", "text"].map(fill);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}));
"""
"""The least contrast of what stands on nodes: their ground is a fill, which has no background."""
