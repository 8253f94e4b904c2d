"""The report's page in a real browser: what is shown, what a click does, and what hostile text cannot do."""

import json
import shutil

import pytest
from playwright.sync_api import sync_playwright
from synthetic_run import hostile_run, results

from grpo_math.report import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def tab(browser):
    """An empty tab. The page that a test opens in it causes no error, and asks for nothing but itself."""
    tab, requests, errors = browser.new_page(), [], []
    tab.on("request", lambda request: requests.append(request.url))
    for trouble in ("pageerror", "dialog", "console"):
        tab.on(trouble, lambda event: errors.append(str(event)))
    yield tab
    assert errors == []
    assert requests == [tab.url]
    tab.close()


def test_hostile_text_stays_text(run, tab):
    tab.goto(report(hostile_run(run)).html.as_uri())
    for source, rows in ((0, 20), (1, 4)):
        tab.locator("[name=show]").select_option(index=source)
        assert tab.locator("img, iframe, math, main script, main link").count() == 0
        assert tab.locator("#rows .sides pre").first.inner_text().startswith("</script><script>")
        assert tab.locator("#rows > *").count() == rows
    assert tab.title() == "Run demo · grpo_math report"


def test_the_filters_the_search_and_the_sort_order_the_rows(run, tab):
    tab.goto(report(run).html.as_uri())

    def shows(count):
        tab.get_by_text(count, exact=True).wait_for()

    def choose(name, option):
        tab.locator(f"select[name={name}]").select_option(label=option)

    shows("1 to 20 of 256")
    tab.locator("#next").click()
    shows("21 to 40 of 256")
    tab.locator('button[data-change="correct to wrong"]').click()
    shows("1 to 14 of 14")
    choose("show", "Training completions")
    shows("1 to 4 of 32")  # groups of eight
    choose("step", "30")
    shows("1 to 4 of 4")
    choose("verdict", "crash")
    shows("1 to 1 of 1")
    choose("verdict", "any")
    choose("step", "any")
    choose("sort", "spread of rewards, highest first")
    shows("1 to 4 of 32")
    spreads = tab.evaluate("matches.map((row) => row.keys['spread of rewards'])")
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[0] > spreads[-1]
    tab.locator("[type=search]").fill("(30.7)")
    shows("1 to 1 of 1")
    tab.locator("[type=search]").fill("(30.7)x")
    shows("nothing matches")


@pytest.mark.full
def test_a_megabyte_is_shown_when_it_is_asked_for_and_one_page_of_groups(run, tab):
    long = results({0}, n=2)
    for row in long["rows"]:
        row["completion"] = "$x$ 1" * 200_000 + "the end"
    for name in ("before", "after"):
        (run / f"{name}.json").write_text(json.dumps(long))
    tab.goto(report(run).html.as_uri())
    assert len(tab.locator("#rows").inner_text()) < 40_000
    button = tab.locator("#rows .sides button").first
    assert button.text_content() == "Show 100,000 of 1,000,007 characters"
    button.click()
    assert tab.evaluate("document.activeElement.textContent.endsWith('(900,007 characters more are in the file)')")
    tab.locator("[name=show]").select_option(index=1)
    assert tab.evaluate("[matches.length, rowsBox.children.length]") == [8 * 4, 4]
