"""Opening a page in Chromium, and the checks that every page must pass."""

from __future__ import annotations

import json
import shutil
from typing import Any

BROWSER, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTHS = (360, 1200)
SCHEMES = ("light", "dark")


def opened(browser: Any, page: str, width: int = 1200, scheme: str = "light") -> None:
    """Open the page afresh, on a screen of this width and in this colour scheme."""
    browser.get("about:blank")
    browser.execute_cdp_cmd("Browser.resetPermissions", {})
    browser.get_log("performance")
    browser.get_log("browser")
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page)


def requests(browser: Any) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in sent if not url.startswith("data:")]


def announcement(browser: Any) -> str:
    """The text for screen readers after a click on a button, which comes once the browser has answered."""
    from selenium.webdriver.support.wait import WebDriverWait

    region = browser.find_element("id", "said")
    return str(WebDriverWait(browser, timeout=60, poll_frequency=0.02).until(lambda _: region.text))


CONTRAST = """
const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const numbers = text => text.match(/[\\d.]+/g).map(Number);
const ground = element => {
  for (; element; element = element.parentElement) {
    const colour = numbers(getComputedStyle(element).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  if (!own || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
  const [a, b] = [numbers(getComputedStyle(element).color), ground(element)].map(luminance);
  found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.textContent.slice(0, 40)]);
}
return found.sort((x, y) => x[0] - y[0]);
"""
