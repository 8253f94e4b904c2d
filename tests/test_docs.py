"""README.md and docs/ say what is there: the tree, every command, field and reward, and every file that they link."""

import re
import subprocess
import sys
from statistics import mean, stdev

import pytest
import yaml
from launching import ROOT

from grpo_math import __version__
from grpo_math.cli import COMMANDS
from grpo_math.problems.prompts import TEMPLATES
from grpo_math.rewards import REWARDS
from grpo_math.run.metrics import METRICS

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {"README.md": README} | {
    f"docs/{page.name}": page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))
}
ALL = "\n".join(PAGES.values())


def test_the_changelog_begins_with_the_version():
    title = re.search(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    date = "unreleased" if "dev" in __version__ else citation["date-released"]
    assert title == f"## {__version__} ({date})"
    assert citation["version"] == __version__


def test_the_readme_and_the_pages_are_read_to_the_end():
    assert len(README.splitlines()) <= 130
    assert sum(len(text.split()) for text in PAGES.values()) <= 11_500


@pytest.mark.slow
def test_every_computed_table_is_what_its_program_writes():
    """The settings, the findings, the layouts, and what fits each card."""
    done = subprocess.run([sys.executable, "docs/make_tables.py"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ""), f"{done.stderr}run python docs/make_tables.py --write"


def test_the_page_of_metrics_names_each_metric():
    """By its whole name, or by what follows the slash: `memory/allocated`, `reserved`."""
    page = PAGES["docs/reference.md"]
    for name in METRICS:
        group, _, short = name.partition("/")
        assert f"`{name}`" in page or (f"`{short}`" in page and f"`{group}/" in page), name


def test_the_page_to_start_with_says_what_the_recipes_say():
    """Rate, group and length of each shipped recipe that the table names."""
    rows = [row for row in PAGES["docs/start.md"].splitlines() if row.startswith("| ")]
    for path in sorted((ROOT / "launch/configs").glob("*.yaml")):
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        for row in (row for row in rows if f"`{path.stem}`" in row):
            _, _, _, _, rate, group, prompts, length, _ = (cell.strip() for cell in row.split("|")[:9])
            assert (float(rate), int(group)) == (float(recipe["learning_rate"]), recipe["num_generations"]), row
            assert int(length.replace(",", "")) == recipe["max_completion_length"], row
            rows_of_step = recipe["per_device_train_batch_size"] * recipe.get("gradient_accumulation_steps", 1)
            assert int(prompts) == recipe.get("prompts_per_step", rows_of_step // recipe["num_generations"]), row


def test_the_figure_of_algorithms_is_what_its_sentences_say():
    rows = re.findall(r"^\|`\w+`\|(.*)\|$", PAGES["docs/algorithms.md"], re.MULTILINE)
    columns = [[float(cell) for cell in row.split("|")] for row in rows]
    rewards = [reward for reward, *_ in columns]
    for reward, advantage, sampled, now, ratio, product in columns:
        exact = (reward - mean(rewards)) / stdev(rewards)
        assert (advantage, ratio) == (round(exact, 2), round(now / sampled, 2))
        assert product == round(min(ratio * exact, min(max(ratio, 0.8), 1.2) * exact), 2)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings.

    >>> anchors("# On 8 GB, by plan\\n")
    {'on-8-gb-by-plan'}
    """
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


LINKS = [(page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^)\s]+)\)", text)]


@pytest.mark.parametrize(("page", "link"), [one for one in LINKS if not re.match(r"https?://", one[1])])
def test_a_relative_link_leads_somewhere(page, link):
    file, _, anchor = link.partition("#")
    target = ((ROOT / page).parent / file).resolve() if file else ROOT / page
    assert target.exists(), f"{page} links {link}"
    if anchor:
        assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page} links {link}"


def test_the_readme_links_every_page():
    assert {link for page, link in LINKS if page == "README.md"} | {"README.md"} >= PAGES.keys()


def test_every_path_that_is_named_is_there():
    """A file or folder of ours in backticks, from the root or, for a module, from `grpo_math`."""
    folders = "|".join(path.parent.name for path in (ROOT / "grpo_math").glob("*/__init__.py"))
    for page, text in PAGES.items():
        for path in re.findall(
            rf"`((?:(?:grpo_math|tests|launch|examples|docs)/|(?:{folders})/\w+\.py)[\w./-]*)`", text
        ):
            assert (ROOT / path).exists() or (ROOT / "grpo_math" / path).exists(), f"{page} names {path}"


def test_the_tree_names_every_module_and_no_other():
    tree = PAGES["docs/internals.md"].partition("```text\ngrpo_math/")[2].partition("```")[0]
    package = ROOT / "grpo_math"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    named = set(re.findall(r"^ {2}(\w+(?:\.py|/))", tree, re.MULTILINE))
    assert named == folders | {path.name for path in package.glob("*.py")}


@pytest.mark.parametrize("name", [*(f"grpo-math {command}" for command in COMMANDS), *REWARDS, *TEMPLATES])
def test_every_command_reward_and_template_is_shown(name):
    assert f"`{name}`" in ALL or f"\n{name} " in ALL
