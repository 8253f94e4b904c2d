"""The report on synthetic run directories: whole, half written, damaged, hostile and large."""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import escape
from synthetic_run import HOSTILE, RIGHT_AFTER, RIGHT_BEFORE, hostile_run, results, write_completions

from grpo_math.checks.diagnosis import CHECKS
from grpo_math.cli import main
from grpo_math.errors import ConfigError
from grpo_math.evaluation.compare import compare
from grpo_math.report import (
    Change,
    ResultsError,
    changed,
    read_results,
    report,
    run_dir,
    terminal_changes,
    terminal_table,
)
from grpo_math.report.plots import CSS_COLOURS, DETAILS, TRAINING, captions, condensed, moving_average, render
from grpo_math.report.run_dir import Run, read_run
from grpo_math.report.viewer import sources
from grpo_math.run import metrics
from grpo_math.run.metrics import IN_FORMAT

pytestmark = pytest.mark.slow  # a page with its plots each: three of them are in fast.py's CORE
ROOT = Path(__file__).parents[2]


def page_of(run):
    return report(run).html.read_text(encoding="utf-8")


def rows_of(run, source=0):
    """The rows of the viewer's source."""
    return sources(read_run(run), comparable=True)[source].rows


def test_the_headline_says_by_how_much_and_how_sure(run):
    page = page_of(run)
    paired = compare(read_results(run / "before.json"), read_results(run / "after.json"))
    assert (paired.gained, paired.lost, paired.n) == (110, 14, 256)
    # (190 - 94) / 256 = 0.375
    assert '36.7% <span class="arrow">→</span> 74.2%' in page
    assert f"+37.5 points</strong>, 95% paired interval +{100 * paired.lo:.1f} to +{100 * paired.hi:.1f}." in page
    in_format = compare(read_results(run / "before.json"), read_results(run / "after.json"), IN_FORMAT)
    assert f"accuracy went from 33.6% to 68.0% ({100 * in_format.difference:+.1f} points" in page
    assert "on the same 256 problems: 110 went from wrong to right and 14 back (McNemar p &lt; 0.0001)" in page
    for fact in ("SmolLM2-135M-Instruct", "embedded:level=1", "gsm8k"):
        assert f"<dd>{fact}</dd>" in page
    assert "Missing or left out" not in page


def test_an_interval_that_holds_zero_is_called_no_clear_change(run):
    (run / "after.json").write_text(json.dumps(results(set(range(2, 97)))))
    page = page_of(run)
    assert "<strong>+0.4 points</strong>" in page
    assert "The interval holds zero: no clear change." in page


def test_the_outcome_table_counts_every_category_before_and_after(run):
    page = page_of(run)
    for name in ("before", "after"):
        rows = json.loads((run / f"{name}.json").read_text())["rows"]
        for category, label in (
            ("truncated", "cut at the length limit"),
            ("wrong_answer", "format right, answer wrong"),
        ):
            n = sum(row["category"] == category for row in rows)
            assert re.search(rf'<th scope="row">{label}</th>.*?<td>{n} \({n / 256:.1%}\)</td>', page)
    assert '<th scope="row">correct, in the format</th><td>86 (33.6%)</td><td>174 (68.0%)</td><td>+34.4</td>' in page
    assert '<th scope="row">accuracy, in whatever form</th><td>36.7%</td><td>74.2%</td><td>+37.5</td>' in page


def test_the_plots_are_pngs_and_the_page_carries_its_own(whole_run):
    files = report(whole_run)
    assert [path.relative_to(whole_run).as_posix() for path in files.plots] == [
        "plots/training.png",
        "plots/details.png",
    ]
    for path in files.plots:
        assert path.read_bytes().startswith(b"\x89PNG")
    page = files.html.read_text(encoding="utf-8")
    assert page.count("<svg ") == 10
    for colour in CSS_COLOURS:
        assert colour not in page.split("</style>")[1]


def test_the_page_loads_nothing_from_anywhere(whole_run):
    page = page_of(whole_run)
    assert not re.findall(r"(?:src|href|action)\s*=\s*[\"']?(?!#)[^\"'\s>]+", page.split("<script>")[0])
    assert "@import" not in page
    assert not re.findall(r"url\((?!#)", page)
    assert "default-src 'none'" in page
    outside = set(re.findall(r"https?://[^\"'\s<]+", page))
    assert all(address.startswith("http://www.w3.org/") for address in outside), outside


def test_the_policy_names_the_hash_of_the_only_script_that_runs(run):
    page = page_of(run)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in page


def test_hostile_text_never_becomes_markup(run):
    page = page_of(hostile_run(run))
    tags = Tags()
    tags.feed(page)
    assert (tags.scripts, tags.forbidden) == (1, [])
    assert "\u2028" not in page
    assert str(escape(HOSTILE.replace("\u2028", "⟨U+2028⟩").partition(" \\boxed")[0])) in page


class Tags(HTMLParser):
    """Counts script elements and collects what only hostile text could have put into the page."""

    def __init__(self):
        super().__init__()
        self.scripts, self.forbidden = 0, []

    def handle_starttag(self, tag, attributes):
        self.scripts += tag == "script"
        if tag in ("img", "iframe", "object", "embed", "link", "form", "base") or any(
            a.startswith("on") for a, _ in attributes
        ):
            self.forbidden.append((tag, attributes))


def test_a_note_that_quotes_a_hostile_id_is_escaped_and_stays_one_line(run):
    rows = [{"id": HOSTILE + "\n", "completion": "", "category": "correct"}] * 2
    (run / "after.json").write_text(json.dumps({"format": 1, "rows": rows}))
    files = report(run)
    assert "\n" not in files.notes[0]
    tags = Tags()
    tags.feed(files.html.read_text(encoding="utf-8"))
    assert (tags.scripts, tags.forbidden) == (1, [])


def test_lone_surrogates_control_and_direction_characters_are_shown_by_name(run):
    broken = results({0}, n=2)
    broken["rows"][0]["completion"] = broken["rows"][1]["problem"] = "\ud800 \x00 \x1b[31m \x0b\r\n\u202e1\U000e0041"
    for name in ("before", "after"):
        (run / f"{name}.json").write_text(json.dumps(broken))
    assert rows_of(run)[0].sides[0].turns[0][1] == "⟨U+D800⟩ ␀ ␛[31m ␋\n⟨U+202E⟩1⟨U+E0041⟩"


def test_credentials_of_the_config_are_not_on_the_page(run):
    page = page_of(run)
    assert "hf_verysecret" not in page
    assert '<th scope="row">hub_token</th><td>(not shown)</td>' in page
    assert '<th scope="row">peft.r</th><td>16</td>' in page
    assert '<th scope="row">trl</th><td>1.16.0</td>' in page
    assert "<h3>Command</h3><pre>grpo-math demo</pre>" in page


@pytest.mark.full
def test_a_run_that_is_still_going_is_reported_and_what_is_missing_is_named(whole_run):
    (whole_run / "after.json").unlink()
    (whole_run / "config.yaml").unlink()
    shutil.rmtree(whole_run / "completions")
    with (whole_run / "history.jsonl").open("a") as file:
        file.write('{"step": 81, "rew')
    files = report(whole_run)
    assert files.notes == [
        "config.yaml is missing: settings and versions are not known",
        "history.jsonl: 1 lines are not JSON objects and are left out, first line 85",
        "after.json is missing: there is no such evaluation",
        "completions/ has no files: there are no training completions to show (see log_completions)",
    ]
    page = files.html.read_text(encoding="utf-8")
    for note in files.notes:
        assert note in page
    assert "accuracy before training, 95% interval 31.1% to 42.8%, n = 256 problems" in " ".join(page.split())
    assert "Problems that changed" not in page


@pytest.mark.full
def test_a_corrupted_line_in_the_middle_is_skipped_and_named(whole_run):
    lines = (whole_run / "history.jsonl").read_text().splitlines()
    lines[10] = "\x00\x00\ufffd{"
    lines[20] = "[1, 2]"
    (whole_run / "history.jsonl").write_text("\n".join(lines) + "\n")
    files = report(whole_run)
    assert files.notes == ["history.jsonl: 2 lines are not JSON objects and are left out, first line 11"]


def test_bytes_that_are_no_text_only_cost_their_own_line(run):
    (run / "history.jsonl").write_bytes(
        b'{"step": 1, "reward": 0.5}\n\xff\xfe\x00\n{"step": 3, "reward": NaN, "loss": 1}\n'
    )
    read = read_run(run)
    assert [row["step"] for row in read.history] == [1, 3]
    assert read.notes == ["history.jsonl: 1 lines are not JSON objects and are left out, first line 2"]
    assert report(run).plots


def test_the_lines_of_one_step_are_one_row(run):
    (run / "history.jsonl").write_text(
        '{"step": 1, "reward": 0.5}\n{"step": 1, "heldout/accuracy": 0.25}\n{"step": 2, "reward": 1}\n'
    )
    assert read_run(run).history == [{"step": 1, "reward": 0.5, "heldout/accuracy": 0.25}, {"step": 2, "reward": 1.0}]


@pytest.mark.slow
def test_a_run_that_two_graders_evaluated_ends_with_both_accuracies_and_no_comparison(run, capsys):
    from grpo_math.report.verdict import print_verdict

    (run / "before.json").write_text(json.dumps(results(RIGHT_BEFORE, grader=11)))
    files = print_verdict(run, run / "adapter")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not compared" in line]
    assert line.startswith("accuracy 36.7% before, 74.2% after; not compared: grader differs (before 11, after 12): ")
    (note,) = files.notes
    assert note.startswith("before.json and after.json are not compared: grader differs")
    assert "95% paired interval" not in files.html.read_text()


def test_a_resumed_run_counts_its_newest_attempt(run):
    rows = [{"step": step, "reward": 0.0} for step in (1, 2, 3, 4, 5)] + [{"step": 3, "reward": 1.0}]
    (run / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_run(run)
    assert [(row["step"], row["reward"]) for row in read.history] == [(1, 0), (2, 0), (3, 1)]


@pytest.mark.parametrize("content", ["", "\n\n", '{"ste'])
def test_a_history_without_a_step_leaves_no_plots_and_says_so(run, content):
    (run / "history.jsonl").write_text(content)
    files = report(run)
    assert files.plots == []
    assert "history.jsonl has no step yet: there are no curves" in files.notes
    assert "74.2%" in files.html.read_text(encoding="utf-8")


def test_the_findings_stand_above_the_plots_and_come_back(run):
    lines = [{"step": step, "reward": 0.5, "completions/clipped_ratio": 0.4} for step in range(1, 31)]
    (run / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (run / "config.yaml").write_text("max_completion_length: 256\n")
    files = report(run)
    [finding] = files.findings
    assert (finding.level, finding.check) == ("warning", "truncation")
    assert finding.remedy.endswith(": max_completion_length: 512")
    page = files.html.read_text(encoding="utf-8")
    assert page.index("<h2>Diagnosis</h2>") < page.index(html.escape(finding.message)) < page.index("<svg ")
    assert html.escape(finding.remedy) in page


def test_a_run_without_a_finding_says_so_and_one_without_steps_says_nothing(run):
    assert f"None of the {len(CHECKS)} checks found anything in these 5 steps." in page_of(run)
    (run / "history.jsonl").unlink()
    assert "Diagnosis" not in page_of(run)


def test_before_and_after_take_part_in_the_diagnosis(run):
    (run / "after.json").write_text(json.dumps(results(set(range(40)))))
    [finding] = report(run).findings
    assert finding.check == "heldout_worse"
    assert "36.7%" not in finding.message
    assert "37% of 256 problems before training, 16% of 256 at step 5" in finding.message
    rows = results(set(range(40)))
    rows["rows"][0]["id"] = "another problem"
    (run / "after.json").write_text(json.dumps(rows))
    assert report(run).findings == []


def test_the_command_prints_a_line_for_each_finding_and_json_holds_it_whole(run, capsys):
    (run / "after.json").write_text(json.dumps(results(set(range(40)))))
    assert main(["report", str(run)]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("error: held-out accuracy is below the base model's: 37% of 256")
    assert main(["report", str(run), "--json"]) == 0
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert set(finding) == {"level", "check", "message", "remedy"}


def test_a_run_with_nothing_but_before_is_reported(tmp_path):
    (tmp_path / "before.json").write_text(json.dumps(results({1}, n=2)))
    files = report(tmp_path)
    assert len(files.notes) == 4
    assert ">50.0%</p>" in files.html.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ("", "JSONDecodeError: "),
        ('{"format": 2}', "is not a results file of format 1: run the evaluation again"),
        ('{"format": 1, "rows": []}', "is not a results file of format 1: run the evaluation again"),
    ],
)
def test_a_damaged_results_file_is_one_line(run, content, note):
    (run / "after.json").write_text(content)
    files = report(run)
    (line,) = files.notes
    assert line.startswith("after.json cannot be read and is left out: ")
    assert note in line
    assert "accuracy before training" in files.html.read_text(encoding="utf-8")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run_dir=.* holds no config.yaml, .* or trainer_state.json"):
        report(tmp_path)
    with pytest.raises(ConfigError, match=r"run_dir=.*nowhere' is not a folder"):
        report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def other_template(after):
    after["template"] = "boxed"


def other_problems(after):
    after["rows"] = [*after["rows"][:-1], after["rows"][-1] | {"id": "products-1"}]


def other_text(after):
    after["rows"][3]["problem"] = "What is 1 + 1?"


def other_gold(after):
    after["rows"][3]["gold"] = "-1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_template, "template differs (before 'gsm8k', after 'boxed')"),
        (other_problems, "the problems differ (before 256, after 256, in one only 2, such as 'products-1')"),
        (other_text, "problem of 'sums-3' differs"),
        (other_gold, "gold of 'sums-3' differs"),
    ],
)
def test_runs_over_different_problems_or_templates_are_not_compared(run, change, words):
    before, after = results(RIGHT_BEFORE), results(RIGHT_AFTER)
    change(after)
    for function in (compare, changed, terminal_table):
        with pytest.raises(ResultsError) as refused:
            function(before, after)
        assert str(refused.value).startswith(words)
        assert "\n" not in str(refused.value)
    (run / "after.json").write_text(json.dumps(after))
    files = report(run)
    assert len(files.notes) == 1
    assert words in files.notes[0]
    page = files.html.read_text(encoding="utf-8")
    assert "paired interval" not in page
    assert "not compared" in page
    assert page.count("<article ") == 512 + 8 * 4


def test_problems_are_paired_by_id_and_not_by_place():
    before, after = results(RIGHT_BEFORE), results(RIGHT_AFTER)
    expected = compare(before, after)
    after["rows"].reverse()
    assert compare(before, after) == expected


def test_changed_gives_the_first_problems_of_each_direction():
    before, after = results({0, 1}, n=6), results({1, 3, 4, 5}, n=6)
    assert [change.id for change in changed(before, after, limit=2)] == ["sums-3", "sums-4"]
    (lost,) = changed(before, after, lost=True)
    assert (lost.id, lost.problem, lost.gold) == ("sums-0", "What is 1 + 2?", "3")
    assert lost.before == "1 + 2 = 3\n#### 3"
    assert lost.after == after["rows"][0]["completion"]


def test_the_terminal_table_lines_up():
    table = terminal_table(results(RIGHT_BEFORE), results(RIGHT_AFTER, seed=1)).splitlines()
    assert table[0].split() == ["before", "after", "difference", "95%", "paired", "interval"]
    assert re.fullmatch(r"accuracy +36\.7%  74\.2%  \+37\.5 points +\[\+3\d\.\d, \+4\d\.\d\]", table[1])
    assert table[2].split()[:6] == ["accuracy", "in", "format", "33.6%", "68.0%", "+34.4"]
    assert table[3].split() == ["correct,", "in", "the", "format", "86", "174", "+88"]
    assert table[-1].startswith("256 problems: 110 went from wrong to right, 14 back (McNemar, exact: p = ")
    assert len({line.index(word) + len(word) for line, word in ((table[1], "74.2%"), (table[3], "174"))}) == 1
    assert not any(line.endswith(" ") for line in table)


def test_printed_completions_cannot_drive_the_terminal():
    change = Change("a", "What is\t1 + 1?", "2", "\x1b[2J\x07\x9b2J", "1 + 1 = 2\n#### 2")
    text = terminal_changes([change])
    assert all(character == "\n" or character.isprintable() for character in text)
    assert [line.partition(" | ")[2] for line in text.splitlines()[1:]] == ["after", "1 + 1 = 2", "#### 2"]


def test_training_completions_come_as_chats_or_as_text(run):
    shutil.rmtree(run / "completions")
    write_completions(run, [1], rows=8)
    write_completions(run, [2], rows=8, conversational=False)
    rows = rows_of(run, 1)
    assert [len(row.sides) for row in rows] == [8, 8]  # a problem's completions are one row
    assert [row.sides[0].turns for row in rows] == [[("", f"3 + 4 = 7\n#### 7 ({step}.0)")] for step in (1, 2)]
    assert (rows[0].question, rows[0].prompt) == ("What is 1 + 0?", "system: Work it out.\n\nuser: What is 1 + 0?")
    assert (rows[1].question, rows[1].prompt) == ("What is 2 + 0?", "")
    assert rows[0].sides[5].facts == "correctness_reward none, advantage -0.5"
    assert rows[0].sides[7].facts == "correctness_reward none, advantage -1"
    assert rows[0].sides[5].badge == "crash"
    assert rows[0].fields["verdict"] == ["correct", "wrong", "no_answer", "crash"]
    assert rows[0].title == "step 1: 3 of 8 right, rewards 0 to 1"
    assert sources(read_run(run), comparable=True)[1].filters["step"] == ["1", "2"]


def test_a_damaged_completions_file_is_skipped_and_named(run):
    (run / "completions" / "completions_00030.parquet").write_bytes(b"PAR1 half")
    read = read_run(run)
    assert [note.partition(":")[0] for note in read.notes] == [
        "completions/completions_00030.parquet cannot be read and is left out"
    ]
    assert len(read.completions) == 7 * 32


def test_a_batch_that_is_logged_again_is_shown_once(run):
    first = run / "completions" / "completions_00010.parquet"
    shutil.copy(first, run / "completions" / "completions_00011.parquet")
    assert len(read_run(run).completions) == 8 * 32


def test_a_long_run_is_thinned_by_whole_steps_and_says_so(run, monkeypatch):
    monkeypatch.setattr(run_dir, "MOST_COMPLETION_FILES", 3)
    read = read_run(run)
    # 8 files, every 3rd from the newest: 20, 50, 80.
    assert sorted({row["step"] for row in read.completions}) == [20, 50, 80]
    assert read.notes == ["the training completions of one logged step in 3 are shown: all of them are in completions/"]
    monkeypatch.setattr(run_dir, "MOST_COMPLETION_CHARACTERS", 2000)
    # 96 completions of about 25 characters are more than 2,000: half of the three steps, from the newest.
    assert sorted({row["step"] for row in read_run(run).completions}) == [20, 80]


@pytest.mark.full
def test_a_second_report_replaces_the_first_and_leaves_no_temporary_file(run):
    report(run)
    names = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    (run / "report.html").write_text("old")
    report(run)
    assert {path.relative_to(run).as_posix() for path in run.rglob("*")} == names
    assert (run / "report.html").read_text(encoding="utf-8").endswith("</html>\n")


def test_a_report_that_cannot_be_written_keeps_the_old_one(run, monkeypatch):
    (run / "report.html").write_text("old")

    replace = os.replace

    def full(source, target):
        if Path(target).suffix == ".html":
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match="cannot be written \\(No space left on device\\)"):
        report(run)
    assert (run / "report.html").read_text() == "old"
    assert not list(run.rglob(".*"))


@pytest.mark.full
def test_reporting_touches_neither_pyplot_nor_torch_nor_the_settings_of_matplotlib(whole_run):
    program = (
        "import sys, matplotlib\n"
        "def settings():\n"
        "    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != 'backend'}\n"
        "before = settings()\n"
        "import grpo_math.report\n"
        f"grpo_math.report.report({str(whole_run)!r})\n"
        "assert settings() == before\n"
        "print(sorted({'torch', 'trl', 'transformers', 'matplotlib.pyplot'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_report_imports_no_matplotlib_yet():
    program = "import sys, grpo_math.report; print(sorted({'matplotlib', 'pyarrow', 'torch'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_a_panel_is_drawn_only_where_the_history_has_its_metrics(run):
    (run / "history.jsonl").write_text("".join(json.dumps({"step": s, "reward": 0.1 * s}) + "\n" for s in range(1, 6)))
    files = report(run)
    # Reward, and accuracy from before.json and after.json.
    assert files.html.read_text(encoding="utf-8").count("<svg ") == 2
    assert [path.name for path in files.plots] == ["training.png"]


def test_every_panel_reads_metrics_that_exist():
    for panel in (*TRAINING, *DETAILS):
        for key, _, colour in panel.lines:
            assert key in metrics.METRICS
            assert colour in CSS_COLOURS


def test_a_moving_average_of_a_straight_line_is_that_line_inside():
    assert moving_average([0, 1, 2, 3, 4], 3) == [0.5, 1, 2, 3, 3.5]
    assert moving_average([5], 7) == [5]


def test_a_caption_gives_the_ends_of_the_line_that_is_drawn(tmp_path):
    """Of a moving average its own, with the last value beside them; of few values and of the edges, these."""
    history = [{"step": s, "reward": float(s % 2)} for s in range(1, 41)]
    run = Run(tmp_path, history=history)
    average = TRAINING[0]
    (said,) = captions(run, average)
    assert said.startswith("reward: 0.667 at first, 0.333 at last, of the moving average (")
    (few,) = captions(Run(tmp_path, history=history[:5]), average)
    assert few.startswith("reward: 1 at first, 1 at last (")
    drawn = render(run, [average], "svg").decode()
    assert "thick: moving average of 5 steps" in drawn
    assert "moving average" not in render(Run(tmp_path, history=history[:5]), [average], "svg").decode()


def test_a_long_history_is_drawn_in_500_points_that_keep_its_extremes():
    history = [{"step": s, "reward": s % 2, "completions/max_length": 9.0 if s == 700 else 5.0} for s in range(1, 1001)]
    del history[3]["reward"]
    rows = condensed(Run(Path("run"), history=history)).history
    assert len(rows) == 500
    assert [row["step"] for row in rows[:3]] == [2, 4, 6]
    # Steps 1 and 2 have rewards 1 and 0; step 4 has none, so that step 3 counts alone.
    assert [row["reward"] for row in rows[:3]] == [0.5, 1, 0.5]
    assert [row["completions/max_length"] for row in rows[348:351]] == [5, 9, 5]
    short = Run(Path("run"), history=history[:500])
    assert condensed(short) is short
