"""The chat page in a real browser, talking to a real server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.serve.server import serving_here

pytestmark = pytest.mark.skipif(
    shutil.which("chromedriver") is None, reason="no Chromium with its driver on this machine; .ci/run installs one"
)
SECONDS = 60


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for each in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"):
        options.add_argument(f"--{each}")
    options.add_argument("--disable-component-update")
    options.add_argument("--disable-sync")
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as driver:
        yield driver


def wait_for(browser: webdriver.Chrome, css: str, expected: str) -> str:
    """Wait until the last element of a kind contains a text, and return its text."""

    def text(_: webdriver.Chrome) -> str | bool:
        elements = browser.find_elements(By.CSS_SELECTOR, css)
        return elements[-1].text if elements and expected in elements[-1].text else False

    return str(WebDriverWait(browser, SECONDS).until(text))


def test_a_chat_shows_which_tokens_were_drafted(bundle: Path, browser: webdriver.Chrome) -> None:
    with serving_here(bundle, k=2) as server:  # `k = auto` may not draft on a slow machine
        browser.get(server.url)
        assert "target + draft, up to " in wait_for(browser, "#model", "target")
        browser.find_element(By.ID, "tokens").send_keys(Keys.CONTROL, "a")
        browser.find_element(By.ID, "tokens").send_keys("36")
        browser.find_element(By.ID, "prompt").send_keys("A table for two, please.", Keys.ENTER)
        note = wait_for(browser, ".note", "mean acceptance length")
        assert note.startswith("36 tokens in")
        pieces = browser.find_elements(By.CSS_SELECTOR, ".answer span")
        shown = "".join(str(piece.get_property("textContent")) for piece in pieces)
        params = SamplingParams(max_new_tokens=36)
        want = Outrider.load(bundle).generate("Customer: A table for two, please.\nAgent:", params, k=0)
        assert shown == "".join(event.text for event in want)
        kinds = {piece.get_attribute("class") for piece in pieces}
        assert kinds == {"draft", "own"}
        colours = {piece.value_of_css_property("color") for piece in pieces}
        assert len(colours) == 2

        # A second turn sends the whole conversation; messages are shown as text, whatever they contain.
        browser.find_element(By.ID, "prompt").send_keys("<b>Bold</b>", Keys.ENTER)
        WebDriverWait(browser, SECONDS).until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, ".note")) == 2)
        wait_for(browser, ".note", "mean acceptance length")
        assert browser.find_elements(By.CSS_SELECTOR, ".user")[-1].text == "<b>Bold</b>"
        assert browser.find_elements(By.CSS_SELECTOR, ".user b") == []
        logged = browser.get_log("browser")  # type: ignore[no-untyped-call]
        assert [each for each in logged if each["level"] == "SEVERE"] == []


def test_it_asks_for_a_key_when_one_is_required(bundle: Path, browser: webdriver.Chrome) -> None:
    with serving_here(bundle, keys=("secret",)) as server:
        browser.get(server.url)
        wait_for(browser, "#model", "enter an API key below")
        browser.find_element(By.ID, "prompt").send_keys("Hi", Keys.ENTER)
        assert "an API key is required" in wait_for(browser, ".error", "key")
        browser.find_element(By.ID, "key").send_keys("secret")
        wait_for(browser, "#model", "target")
        browser.find_element(By.ID, "prompt").send_keys("Hi", Keys.ENTER)
        wait_for(browser, ".note", "tokens in")
