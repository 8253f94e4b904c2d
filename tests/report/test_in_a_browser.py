"""The report's page in a real browser: what is shown, what a click does, and what hostile text cannot do."""

import json

import pytest
from chromium import CHROMIUM, Browser
from synthetic_run import hostile_run, results

from grpo_math.report import report
from grpo_math.report.formulas import ATTRIBUTES, ELEMENTS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def fine(browser, page):
    """Nothing went wrong in the page, and it asked for nothing but itself."""
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]


def test_hostile_text_stays_text(run, browser):
    page = report(hostile_run(run)).html
    browser.open(page)
    for source, rows in ((0, 20), (1, 4)):
        browser.run(f"control('show').selectedIndex = {source}, useSource({source})")
        for _ in ("formulas", "as they are written"):
            browser.run("document.querySelector('input[name=written]').click()")
            assert browser.run("document.querySelectorAll('img, iframe, main script, main link').length") == 0
            assert browser.run("rowsBox.querySelector('.sides pre').innerText").startswith("</script><script>")
            assert browser.run("rowsBox.children.length") == rows
    assert browser.run("document.title") == "Run demo · grpo_math report"
    fine(browser, page)


# Each tries to end the text it stands in, to be taken for markup inside a formula, or to wear the page out.
HOSTILE_FORMULAS = [
    r"$\text{<img src=x onerror=document.title='owned'>}$",
    r"\(<script>document.title='owned'</script>\)",
    r"$\color{red;background:url(http://example.com)}{x}\textcolor{url(x)}{y}$",
    r"\begin{array}{<b>}<b>&\href{javascript:alert(1)}{x}\end{array}",
    r"$\hspace{1em\" onclick=\"alert(1)}\unknown{<svg onload=alert(1)>}$",
    "$" + r"x^{" * 300 + "}" * 300 + "$",
    "$x$" * 5000,
    "$a\u202eb\u0000c\U000e0041$",
    r"$\__proto__ \constructor \begin{constructor}\end{constructor} \toString$",
    r"It is \boxed{\frac{1}{2}}.",
]


def test_hostile_formulas_stay_text_and_small_and_all_can_be_seen_as_written(run, browser):
    broken = results({0}, n=len(HOSTILE_FORMULAS))
    for row, text in zip(broken["rows"], HOSTILE_FORMULAS, strict=True):
        row["completion"] = row["problem"] = text
    for name in ("before", "after"):
        (run / f"{name}.json").write_text(json.dumps(broken))
    page = report(run).html
    browser.open(page)
    fine(browser, page)
    assert browser.run("document.title") == "Run demo · grpo_math report"
    # What formulas are made of: MathML without a link, and no attribute that a text could fill.
    names = "(list) => [...new Set([...document.querySelectorAll('math *')].flatMap(list))]"
    assert {"mfrac"} <= set(browser.run(f"({names})((node) => [node.localName])")) <= ELEMENTS
    assert set(browser.run(f"({names})((node) => node.getAttributeNames())")) <= ATTRIBUTES | {"class"}
    assert browser.run("document.querySelectorAll('*').length") < 20000
    assert browser.run("rowsBox.textContent.includes('\\\\u202e')")
    browser.run("document.querySelector('input[name=written]').click()")
    assert browser.run("document.querySelectorAll('math').length") == 0
    assert browser.run("rowsBox.textContent.includes('\\\\boxed{\\\\frac{1}{2}}.')")


def test_the_filters_the_search_and_the_sort_order_the_rows(run, browser):
    page = report(run).html
    browser.open(page)

    def choose(name, option):
        select = f"document.querySelector('select[name={name}]')"
        browser.run(f"{select}.selectedIndex = [...{select}.options].findIndex((o) => o.text === '{option}')")
        browser.run(f"{select}.dispatchEvent(new Event('input', {{bubbles: true}}))")
        return browser.run("new Promise((done) => setTimeout(() => done(count.value), 50))")

    def search(text):
        browser.run("document.querySelector('input[type=search]').focus()")
        browser.call("Input.insertText", text=text)
        return browser.run("new Promise((done) => setTimeout(() => done(count.value), 300))")

    assert browser.run("count.value") == "1 to 20 of 256"
    assert browser.run("next.click(); count.value") == "21 to 40 of 256"
    changed = "document.querySelector('button[data-change=\"correct to wrong\"]')"
    assert browser.run(f"{changed}.click(); count.value") == "1 to 14 of 14"
    assert choose("show", "Training completions") == "1 to 4 of 32"  # groups of eight
    assert choose("step", "30") == "1 to 4 of 4"
    assert choose("verdict", "crash") == "1 to 1 of 1"
    choose("verdict", "any")
    choose("step", "any")
    choose("sort", "spread of rewards, highest first")
    spreads = browser.run("matches.map((row) => row.keys['spread of rewards'])")
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[0] > spreads[-1]
    assert search("(30.7)") == "1 to 1 of 1"
    assert search("x") == "nothing matches"
    fine(browser, page)


@pytest.mark.full
def test_a_narrow_screen_shows_a_page_of_groups_and_a_megabyte_when_it_is_asked_for(run, browser):
    long = results({0}, n=2)
    for row in long["rows"]:
        row["completion"] = "$x$ 1" * 200_000 + "the end"
    for name in ("before", "after"):
        (run / f"{name}.json").write_text(json.dumps(long))
    page = report(run).html
    browser.open(page, width=320, height=640)
    assert browser.run("document.documentElement.scrollWidth") == 320
    assert browser.run("rowsBox.innerText.length") < 40_000
    button = "rowsBox.querySelector('.sides button')"
    assert browser.run(f"{button}.textContent") == "Show 100,000 of 1,000,007 characters"
    browser.run(f"{button}.click()")
    assert browser.run("document.activeElement.textContent.endsWith('(900,007 characters more are in the file)')")
    browser.run("useSource(1)")
    assert browser.run("[matches.length, rowsBox.children.length]") == [8 * 4, 4]
    fine(browser, page)
