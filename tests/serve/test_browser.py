"""The status page in a real browser: Debian's chromium, driven by playwright."""

import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.serve.serving import MODEL, PLAIN, serving
from trillion_infer.testing.byte_tokenizer import EOS

DOCS = Path(__file__).parents[2] / "docs"
ANSWER = "Paris is the capital of France."
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; `apt-get install chromium` has it")


@pytest.fixture(scope="module")
def served():
    with serving([*PLAIN.encode(ANSWER), EOS]) as served:
        yield served


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, served):
    """The page; the test fails if it asked anybody else for anything, or said anything on the console."""
    page = browser.new_page(viewport={"width": 1000, "height": 640})
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(served.url)
    yield page
    page.close()
    assert [url for url in asked if not url.startswith((served.url, "data:"))] == []
    assert [text for text in said if "400 (Bad Request)" not in text] == []


def figure(page, name):
    return page.locator(f'[data-figure="{name}"]')


def test_a_chat_is_answered_and_the_figures_move(page, served):
    expect(page.locator("#state")).to_have_text("healthy")
    expect(page.locator("#model")).to_have_text(MODEL)
    before = int(figure(page, "tokens generated").inner_text())
    page.fill("#text", "What is the capital of France?")
    page.click("button")
    expect(page.locator("#log")).to_contain_text(ANSWER)
    expect(figure(page, "tokens generated")).to_have_text(str(before + len(ANSWER) + 1))
    expect(figure(page, "time to first token")).to_contain_text("ms")
    expect(page.locator("#tiers .tier")).to_have_count(1)
    expect(page.locator("#meshes")).to_contain_text("one device")
    if os.environ.get("WRITE_DOCS"):
        page.screenshot(path=DOCS / "status_page.png")


def test_a_refusal_is_shown_and_the_chat_goes_on(page):
    page.fill("#text", "x" * 5000)
    page.click("button")
    expect(page.locator("#log")).to_contain_text("4096")
    page.fill("#text", "And now?")
    page.click("button")
    expect(page.locator("#log")).to_contain_text(ANSWER)


def test_requests_in_flight_are_listed(page, served):
    running = served.openai().completions.create(
        model=MODEL, prompt="ABCD", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(running))
    expect(page.locator("#live tr")).to_have_count(2)
    expect(page.locator("#live tr").nth(1).locator("td").first).to_have_text("4")
    running.close()
    expect(page.locator("#live tr")).to_have_count(1)
