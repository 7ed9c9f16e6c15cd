"""The browser of the tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chromium import BROWSER, DRIVER, FLAGS


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One Chromium for all tests, with a profile of its own."""
    missing = [name for name, path in {"chromium": BROWSER, "chromedriver": DRIVER}.items() if path is None]
    if missing:
        pytest.skip(f"there is no {' and no '.join(missing)}: sudo apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        driver.get("about:blank")
        yield driver
    finally:
        driver.quit()
