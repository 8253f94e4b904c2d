"""The page of a run: whole, under way, damaged, hostile and large; its plots, and what the command prints."""

import fcntl
import json
import os
import re
import shutil
from html.parser import HTMLParser

import pytest
from markupsafe import escape
from synthetic_run import (
    FIVE_STEPS,
    HOSTILE,
    RIGHT_AFTER,
    RIGHT_BEFORE,
    evaluation,
    hostile_run,
    results,
    words,
    write_completions,
)

from grpo_math.checks.diagnosis import CHECKS
from grpo_math.cli import main
from grpo_math.errors import UserError
from grpo_math.evaluation.paired import compare
from grpo_math.evaluation.tables import comparison_table
from grpo_math.grading import GRADER
from grpo_math.report import report, run_dir, viewer
from grpo_math.report.finish import print_result
from grpo_math.report.plots import CSS_COLOURS, PLOTS


def page_of(run):
    return report(run).html.read_text(encoding="utf-8")


def figures(text):
    """The numbers of a text, in their order."""
    return re.findall(r"[+−]?\d[\d.]*\d%?|[+−]?\d%?", text)


def test_the_page_says_by_how_much_and_how_sure_and_shows_the_settings_without_credentials(run):
    os.utime(run / "history.jsonl", (1_700_000_000, 1_700_000_000))
    files = report(run)
    page = files.html.read_text(encoding="utf-8")
    result, _, facts = words(page, "<header>", "</header>").partition(" model ")
    # 94 of 256 before, 190 after: (190 - 94) / 256 = 0.375. A twelfth of the right ones is not in the format.
    assert figures(result) == [
        *("36.7%", "74.2%", "+37.5", "95%", "+30.5", "+44.5", "256", "110", "14", "0.0001"),
        *("33.6%", "68.0%", "+34.4", "+27.3", "+41.4"),
        # Skill, form, the format kept and the length limit.
        *("+34.4", "+37.5", "+30.5", "+44.5", "3.1", "68.0%", "83.6%", "12.1%", "3.9%"),
    ]
    for fact in (
        "org/SmolLM2-135M-Instruct",
        "embedded:level=1",
        "gsm8k",
        "problems 256",
        "steps 5",
        "25 s",
        "2023-11",
    ):
        assert fact in facts
    # The checks that were made, of all checks, in 5 steps. 7 others need 10 steps.
    diagnosis = words(page, 'id="diagnosis">', "</section>")
    assert figures(diagnosis) == ["5", str(len(CHECKS)), "5", "7", "10", "3", "20", "5", "40", "1", "60", "5"]
    assert diagnosis.endswith("1 needs 60 logged lines, and there are 5.")
    assert figures(words(page, 'id="outcomes">', "</section>")) == [
        *("86", "33.6%", "174", "68.0%", "+34.4", "8", "3.1%", "16", "6.2%", "+3.1"),
        *("57", "22.3%", "30", "11.7%", "−10.5", "74", "28.9%", "26", "10.2%", "−18.8"),
        *("31", "12.1%", "10", "3.9%", "−8.2", "36.7%", "74.2%", "+37.5", "33.6%", "68.0%", "+34.4"),
    ]
    changes = words(page, 'id="changes">', "</section>")
    assert changes.startswith(
        "Problems that changed From wrong to correct: 110 What is 19 + 14? gold answer 33 before 19 + 14 = 34 after "
        "19 + 14 = 33 #### 33 "
    )
    assert changes.count("gold answer") == 10
    assert (
        "Show all 110 in the viewer From correct to wrong: 14 What is 1 + 2? gold answer 3 before 1 + 2 = 3" in changes
    )
    assert words(page, 'id="configuration">', "</section>") == (
        "Configuration Command grpo-math demo Settings (10) model_name_or_path org/SmolLM2-135M-Instruct seed 3 "
        "save_steps 20 learning_rate 0.0003 baseline group_mean hub_token (not shown) peft.r 16 "
        'peft.targets ["q_proj", "v_proj"] '
        "distributed_type NO num_processes 1 Versions (2) trl 1.16.0 torch 2.9.0"
    )
    assert "hf_verysecret" not in page
    # One plot each of the reward, and of the accuracy from before.json and after.json.
    assert page.count("<svg ") == 2
    assert [path.name for path in files.plots] == ["training.png"]
    frame = files._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert 'sandbox="allow-scripts"' in frame


def test_the_viewer_has_the_rows_of_both_kinds_with_their_filters(run):
    heldout, training = page_of(run).split('<template class="source">')[1:]
    assert words(heldout, "", "</article>").partition(" after any ")[0] == (
        "change any correct to wrong correct twice wrong to correct wrong twice before any correct, in the format "
        "correct, not in the format wrong, not in the format wrong, in the format cut at the length limit"
    )
    assert words(heldout, "<article", "</article>").partition("> ")[2] == (
        "sums-0, gold 3 What is 1 + 2? before correct, in the format answer 3 in format yes tokens 14 truncated no "
        "1 + 2 = 3 #### 3 after wrong, in the format answer 8 in format yes tokens 14 truncated no 1 + 2 = 8 "
        "#### 8"
    )
    assert words(training, "<article", "completion 2").partition("> ")[2] == (
        "step 10, problem What is 10 + 0?, gold 7, correct 3 of 8, rewards 0 to 1 What is 10 + 0? whole prompt system: "
        "Work it out. user: What is 10 + 0? completion 1 correct correctness reward 1 advantage 0.75 extracted 7 in "
        "format yes reward 1 tokens 8 truncated no 3 + 4 = 7 #### 7 (10.0)"
    )
    assert (heldout.count("<article"), training.count("<article")) == (256, 8 * 4)


@pytest.mark.slow
def test_all_plots_are_drawn_and_the_page_carries_its_own_and_loads_nothing(run):
    lines = [{"step": step, **{name: 0.1 * step for plot in PLOTS for name, _ in plot.lines}} for step in range(1, 81)]
    (run / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = report(run)
    assert [path.name for path in files.plots] == ["training.png", "details.png"]
    page = files.html.read_text(encoding="utf-8")
    assert page.count("<svg ") == 10
    assert not [colour for colour in CSS_COLOURS if colour in page.split("</style>")[1]]
    assert "default-src 'none'" in page
    assert {*re.findall(r"https?://([^/\"'\s<]+)", page)} == {"www.w3.org"}


def test_hostile_text_never_becomes_markup(run):
    page = page_of(hostile_run(run))
    assert forbidden(page) == []
    assert "\u2028" not in page
    assert str(escape(HOSTILE.replace("\u2028", "\\u2028").partition(" \\boxed")[0])) in page


def forbidden(page):
    """The tags and attributes that only hostile text could have put into the page."""
    tags, parser = [], HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, [name for name, _ in attributes]))
    parser.feed(page)
    assert [tag for tag, _ in tags].count("script") == 1
    outside = ("img", "iframe", "object", "embed", "link", "form", "base")
    return [(tag, names) for tag, names in tags if tag in outside or any(name.startswith("on") for name in names)]


ODD = results({0}, n=2)
ODD["rows"][0]["completion"] = ODD["rows"][1]["problem"] = "\ud800 \x00 \x1b[31m \x0b\n\u202e1\U000e0041"
OTHER = results(set(range(40)))
OTHER["rows"][0]["id"] = HOSTILE


@pytest.mark.parametrize(
    ("files", "present", "absent"),
    [
        pytest.param(
            {
                "after.json": None,
                "completions": None,
                "config.yaml": "max_steps: 9\n",
                "history.jsonl": FIVE_STEPS + '{"step": 6',
            },
            [
                "accuracy before training, 95% interval 31.1% to 42.8%, n = 256 problems",
                f"No problems found (5 of {len(CHECKS)} checks, 5 steps).",
                "Stopped at step 5 of 9.",
            ],
            ["Problems that changed", '<section class="notes">'],
            id="a run that was cut in the middle",
        ),
        pytest.param(
            {"before.json": results(RIGHT_BEFORE, grader=11)},
            [f"36.7% before and 74.2% after training are not compared: grader differs (before 11, after {GRADER})"],
            ["95% paired interval"],
            id="two graders",
        ),
        pytest.param(
            {"after.json": OTHER},
            ["not compared: the problems differ (before 256, after 256, in one only 2, such as ", "No problems found"],
            ["95% paired interval"],
            id="other problems, one with a hostile name",
        ),
        pytest.param(
            {
                "before.json": None,
                "after.json": None,
                "evaluation/base.json": results(RIGHT_BEFORE),
                "evaluation/trained.json": results(RIGHT_AFTER),
            },
            ['36.7% <span class="arrow">→</span> 74.2%'],
            ['<section class="notes">'],
            id="an evaluation of the run, if training made none",
        ),
        pytest.param(
            {
                "evaluation/held_out/base.json": results(RIGHT_BEFORE),
                "evaluation/held_out/trained.json": results(RIGHT_AFTER),
            },
            ['36.7% <span class="arrow">→</span> 74.2%'],
            ["Data sets"],
            id="an evaluation of the run that repeats that of training",
        ),
        pytest.param(
            {
                "after.json": None,
                "evaluation/held_out/base.json": results(RIGHT_BEFORE),
                "evaluation/held_out/trained.json": results(RIGHT_AFTER),
            },
            ['36.7% <span class="arrow">→</span> 74.2%'],
            ["Data sets"],
            id="an evaluation of the run that fills a side",
        ),
        pytest.param(
            {
                "after.json": results(
                    RIGHT_AFTER, request={"template": "{problem}", "system_prompt": "Think <b>first</b>."}
                )
            },
            ["<dd>{problem}</dd>", "<dd>Think &lt;b&gt;first&lt;/b&gt;.</dd>"],
            [],
            id="the template and the system prompt of the evaluation",
        ),
        pytest.param(
            {"before.json": ODD, "after.json": ODD},
            ["\\ud800 \\x00 \\x1b[31m \\x0b \\u202e1\\U000e0041"],
            ["\x00", "\x1b", "\u202e", "\U000e0041"],
            id="characters that are not text",
        ),
    ],
)
def test_what_the_page_says_and_does_not(files, present, absent, run):
    for name, content in files.items():
        path = run / name
        if content is None:
            path.rename(run.parent / name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    page = " ".join(page_of(run).split())
    assert forbidden(page) == []
    assert [one for one in present if one not in page] == []
    assert [one for one in absent if one in page] == []


def test_the_page_of_a_run_that_is_going_begins_with_its_step_and_has_no_yellow_box(run):
    lines = [{"step": s, "reward": 0.1, "step_time": 12.0, "seconds/generate": 9.0} for s in range(1, 7)]
    (run / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 7, "rew')
    (run / "config.yaml").write_text("max_steps: 60\n")
    (run / "after.json").rename(run / "before.json")
    with open(run / ".lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = report(run)
    assert files.notes == []
    assert words(files.html.read_text(), "<header>", "<nav>").partition(" model ")[0] == (
        "Run demo Step 6 of 60, about 11 min left 74.2% accuracy before training, 95% interval 68.5% to 79.2%, n = 256 "
        "problems"
    )
    assert "84 s so far: generation 64%, other 21%, evaluation 15%." in words(files.html.read_text(), "</dl>", "<nav>")
    assert "Stopped at step 6 of 60" in page_of(run)  # the process has ended
    (run / "finished.json").write_text('{"step": 8}')  # early, and the last two steps were not logged
    page = page_of(run)
    assert "Stopped" not in page
    assert " problems 256 steps 8 " in words(page, "<header>", "<nav>")


@pytest.mark.parametrize(
    "name", ["history.jsonl", "after.json", "config.yaml", "completions/completions_00010.parquet"]
)
def test_a_damaged_file_is_named(name, run):
    (run / name).write_bytes(b"PAR1 {: \x00}\n")
    with pytest.raises(UserError, match=f"^{run / name}"):
        report(run)


def test_findings_stand_above_the_plots_and_are_printed(run, capsys):
    (run / "after.json").write_text(json.dumps(results(set(range(40)))))
    assert main(["report", str(run)]) == 0
    line, path = capsys.readouterr().out.splitlines()
    assert path == f"report   {run}/report.html"
    assert main(["report", str(run), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["html"], answer["plots"]) == (f"{run}/report.html", [f"{run}/plots/training.png"])
    [finding] = answer["findings"]
    assert (finding["level"], finding["check"]) == ("error", "heldout_worse")
    assert line.startswith(f"error: {finding['message']}")
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.index("<h2>Diagnosis</h2>") < page.index(str(escape(finding["message"]))) < page.index("<svg ")
    assert str(escape(finding["remedy"])) in page
    print_result(run_dir.read_run(run), run / "adapter")
    assert line in capsys.readouterr().out.splitlines()


def test_the_terminal_table_lines_up():
    table = comparison_table(compare(evaluation(RIGHT_BEFORE), evaluation(RIGHT_AFTER, seed=1))).splitlines()
    assert table[:5] == [
        "                            before  after    difference  95% paired interval",
        "accuracy                     36.7%  74.2%  +37.5 points       [+30.5, +44.5]",
        "accuracy in format           33.6%  68.0%  +34.4 points       [+27.3, +41.4]",
        "correct, in the format          86    174           +88",
        "correct, not in the format       8     16            +8",
    ]
    assert table[-1].startswith("256 problems: 110 went from wrong to correct, 14 back (McNemar: p = ")


def test_training_completions_come_as_chats_or_as_text(run):
    shutil.rmtree(run / "completions")
    write_completions(run, [1], rows=8)
    write_completions(run, [2], rows=8, conversational=False)
    # TRL logs a batch again at each step that trains on it.
    folder = run / "completions"
    (folder / "completions_00002.parquet").rename(folder / "completions_00003.parquet")
    shutil.copy(folder / "completions_00001.parquet", folder / "completions_00002.parquet")
    rows = viewer.sources(run_dir.read_run(run), compared=True)[1].rows
    assert [len(row["completions"]) for row in rows] == [8, 8]  # a problem's completions are one row
    assert [row["completions"][0]["turns"] for row in rows] == [
        [("", f"3 + 4 = 7\n#### 7 ({step}.0)")] for step in (1, 2)
    ]
    assert [(row["question"], row["prompt"]) for row in rows] == [
        ("What is 1 + 0?", "system: Work it out.\n\nuser: What is 1 + 0?"),
        ("What is 2 + 0?", ""),
    ]


def test_a_long_run_is_thinned_by_whole_steps_and_a_large_one_by_whole_rows(run, monkeypatch):
    monkeypatch.setattr(run_dir, "MOST_COMPLETION_FILES", 3)
    monkeypatch.setattr(viewer, "MOST_TEXT", 1000)
    read = run_dir.read_run(run)
    # 8 files, every 3rd from the newest: 20, 50, 80.
    assert sorted({row["step"] for row in read.completions}) == [20, 50, 80]
    # 3 steps of 32 completions with 23 or 24 characters: 2,238, so that every third of the 12 groups is shown.
    assert len(viewer.sources(read, compared=True)[1].rows) == 4
    steps, _, rows = read.notes
    assert steps == "the completions of one logged step in 3 are shown: the others are in completions/"
    assert rows == "Training completions: one row in 3 is shown; all rows are in the files"
