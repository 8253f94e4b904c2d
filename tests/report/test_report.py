"""The report on synthetic run directories: whole, half written, damaged, hostile and large."""

import json
import os
import re
import shutil
from html.parser import HTMLParser

import pytest
from markupsafe import escape
from synthetic_run import HOSTILE, RIGHT_AFTER, RIGHT_BEFORE, hostile_run, results, write_completions

from grpo_math.checks.diagnosis import CHECKS
from grpo_math.cli import main
from grpo_math.errors import ConfigError
from grpo_math.evaluation.compare import compare, comparison
from grpo_math.report import read_results, report, run_dir, viewer
from grpo_math.report.plots import CSS_COLOURS, PLOTS, Curve, curves, svg
from grpo_math.report.run_dir import read_run
from grpo_math.report.terminal import terminal_table
from grpo_math.report.viewer import sources
from grpo_math.run.metrics import IN_FORMAT


def page_of(run):
    return report(run).html.read_text(encoding="utf-8")


def rows_of(run, source=0):
    """The rows of the viewer's source."""
    return sources(read_run(run))[source].rows


@pytest.mark.slow
def test_the_page_says_by_how_much_and_how_sure_and_shows_the_settings_without_credentials(run):
    os.utime(run / "history.jsonl", (1_700_000_000, 1_700_000_000))
    page = page_of(run)
    assert "<dt>date</dt><dd>2023-11-1" in page.replace("\n", "")
    paired = compare(read_results(run / "before.json"), read_results(run / "after.json"))
    assert (paired.gained, paired.lost, paired.n) == (110, 14, 256)
    # (190 - 94) / 256 = 0.375
    assert HEADLINE in page
    assert f"+37.5 points</strong>, 95% paired interval +{100 * paired.lo:.1f} to +{100 * paired.hi:.1f}." in page
    in_format = compare(read_results(run / "before.json"), read_results(run / "after.json"), IN_FORMAT)
    assert f"accuracy went from 33.6% to 68.0% ({100 * in_format.difference:+.1f} points" in page
    assert "on the same 256 problems: 110 went from wrong to correct and 14 back (McNemar p &lt; 0.0001)" in page
    assert "<dd>SmolLM2-135M-Instruct</dd>" in page
    assert '<th scope="row">correct, in the format</th><td>86 (33.6%)</td><td>174 (68.0%)</td><td>+34.4</td>' in page
    assert '<th scope="row">accuracy, in any form</th><td>36.7%</td><td>74.2%</td><td>+37.5</td>' in page
    assert "hf_verysecret" not in page
    assert '<th scope="row">hub_token</th><td>(not shown)</td>' in page
    assert '<th scope="row">peft.r</th><td>16</td>' in page
    assert "<h3>Command</h3><pre>grpo-math demo</pre>" in page


@pytest.mark.slow
def test_the_plots_are_pngs_and_the_page_carries_its_own_and_loads_nothing(whole_run):
    files = report(whole_run)
    assert [path.name for path in files.plots] == ["training.png", "details.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files.plots)
    page = files.html.read_text(encoding="utf-8")
    assert page.count("<svg ") == 10
    assert not [colour for colour in CSS_COLOURS if colour in page.split("</style>")[1]]
    assert "default-src 'none'" in page
    outside = set(re.findall(r"https?://[^\"'\s<]+", page))
    assert all(address.startswith("http://www.w3.org/") for address in outside), outside


@pytest.mark.slow
def test_hostile_text_never_becomes_markup(run):
    page = page_of(hostile_run(run))
    tags = Tags()
    tags.feed(page)
    assert (tags.scripts, tags.forbidden) == (1, [])
    assert "\u2028" not in page
    assert str(escape(HOSTILE.replace("\u2028", "\\u2028").partition(" \\boxed")[0])) in page


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


FIVE_STEPS = "".join(json.dumps({"step": step, "reward": 0.1 * step, "loss": 0.0}) + "\n" for step in range(1, 6))
HEADLINE = '36.7% <span class="arrow">→</span> 74.2%'
ODD = results({0}, n=2)
ODD["rows"][0]["completion"] = ODD["rows"][1]["problem"] = "\ud800 \x00 \x1b[31m \x0b\n\u202e1\U000e0041"
OTHER = results(set(range(40)))
OTHER["rows"][0]["id"] = HOSTILE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "words", "absent"),
    [
        pytest.param(
            {"after.json": None, "config.yaml": None, "completions": None, "history.jsonl": FIVE_STEPS + '{"step": 6'},
            [
                "accuracy before training, 95% interval 31.1% to 42.8%, n = 256 problems",
                f"No problems found: {len(CHECKS)} checks of 5 steps.",
            ],
            ["Problems that changed", '<section class="notes">'],
            id="a run that was cut in the middle",
        ),
        pytest.param(
            {"before.json": results(RIGHT_BEFORE, grader=11)},
            ["accuracy 36.7% before and 74.2% after training are not compared: grader differs (before 11, after 12)"],
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
            [HEADLINE],
            ['<section class="notes">'],
            id="an evaluation of the run, if training made none",
        ),
        pytest.param(
            {"before.json": ODD, "after.json": ODD},
            ["\\ud800 \\x00 \\x1b[31m \\x0b \\u202e1\\U000e0041"],
            ["\x00", "\x1b", "\u202e", "\U000e0041"],
            id="characters that are not text",
        ),
    ],
)
def test_what_the_page_says_and_does_not(files, words, absent, run):
    for name, content in files.items():
        path = run / name
        if content is None:
            path.rename(run.parent / name)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    page = " ".join(page_of(run).split())
    tags = Tags()
    tags.feed(page)
    assert (tags.scripts, tags.forbidden) == (1, [])
    assert [one for one in words if one not in page] == []
    assert [one for one in absent if one in page] == []


@pytest.mark.parametrize(
    "name", ["history.jsonl", "after.json", "config.yaml", "completions/completions_00010.parquet"]
)
def test_a_damaged_file_is_one_line_with_its_name(name, run, capsys):
    (run / name).write_bytes(b"PAR1 {: \x00}\n")
    assert main(["report", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line


@pytest.mark.slow
def test_findings_stand_above_the_plots_and_are_printed(run, capsys):
    lines = [{"step": step, "reward": 0.5, "completions/clipped_ratio": 0.4} for step in range(1, 31)]
    (run / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (run / "config.yaml").write_text("max_completion_length: 256\n")
    (run / "after.json").write_text(json.dumps(results(set(range(40)))))
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert main(["report", str(run), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(one["level"], one["check"]) for one in findings] == [("error", "heldout_worse"), ("warning", "truncation")]
    page = (run / "report.html").read_text(encoding="utf-8")
    for one, line in zip(findings, printed, strict=False):
        assert line.startswith(f"{one['level']}: {one['message']}")
        assert page.index("<h2>Diagnosis</h2>") < page.index(str(escape(one["message"]))) < page.index("<svg ")
        assert str(escape(one["remedy"])) in page


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run_dir=.*nowhere' contains no config.yaml"):
        report(tmp_path / "nowhere")


def test_the_terminal_table_lines_up():
    table = terminal_table(comparison(results(RIGHT_BEFORE), results(RIGHT_AFTER, seed=1))).splitlines()
    assert re.fullmatch(r"accuracy +36\.7%  74\.2%  \+37\.5 points +\[\+3\d\.\d, \+4\d\.\d\]", table[1])
    assert table[3].split() == ["correct,", "in", "the", "format", "86", "174", "+88"]
    assert table[-1].startswith("256 problems: 110 went from wrong to correct, 14 back (McNemar, exact: p = ")
    assert len({line.index(word) + len(word) for line, word in ((table[1], "74.2%"), (table[3], "174"))}) == 1


@pytest.mark.slow
def test_training_completions_come_as_chats_or_as_text(run):
    shutil.rmtree(run / "completions")
    write_completions(run, [1], rows=8)
    write_completions(run, [2], rows=8, conversational=False)
    # TRL logs a batch again at each step that trains on it.
    folder = run / "completions"
    (folder / "completions_00002.parquet").rename(folder / "completions_00003.parquet")
    shutil.copy(folder / "completions_00001.parquet", folder / "completions_00002.parquet")
    rows = rows_of(run, 1)
    assert [len(row.sides) for row in rows] == [8, 8]  # a problem's completions are one row
    assert [row.sides[0].turns for row in rows] == [[("", f"3 + 4 = 7\n#### 7 ({step}.0)")] for step in (1, 2)]
    assert (rows[0].question, rows[0].prompt) == ("What is 1 + 0?", "system: Work it out.\n\nuser: What is 1 + 0?")
    assert (rows[1].question, rows[1].prompt) == ("What is 2 + 0?", "")
    assert set(rows[0].fields["verdict"]) == {"correct", "wrong", "no_answer", "crash"}
    page = page_of(run)
    assert "<h3>step 1, problem What is 1 + 0?, gold 7, correct 3 of 8, rewards 0 to 1</h3>" in page
    assert "<small>correctness reward none, advantage -1, " in page
    assert '<option value="1">1</option>' in page


def test_a_long_run_is_thinned_by_whole_steps_and_a_large_one_by_whole_rows(run, monkeypatch):
    monkeypatch.setattr(run_dir, "MOST_COMPLETION_FILES", 3)
    monkeypatch.setattr(viewer, "MOST_TEXT", 1000)
    read = read_run(run)
    # 8 files, every 3rd from the newest: 20, 50, 80.
    assert sorted({row["step"] for row in read.completions}) == [20, 50, 80]
    _heldout, training = sources(read)
    assert 3 <= len(training.rows) < 3 * 4
    steps, _, rows = read.notes
    assert steps == "the completions of one logged step in 3 are shown: the others are in completions/"
    assert rows.startswith("Training completions: one row in ")


def test_the_reward_functions_are_curves_of_the_reward_if_there_are_several():
    lines = [{"step": 1, "reward": 1.5, "rewards/gsm8k/mean": 1.0, "rewards/length/mean": 0.5}]
    reward = next(plot for plot in PLOTS if plot.title == "Reward")
    assert [line.label for line in curves(lines, reward)] == ["reward", "gsm8k", "length"]
    del lines[0]["rewards/length/mean"]
    assert [line.label for line in curves(lines, reward)] == ["reward"]


def test_the_pointer_shows_the_step_and_the_value_of_a_point():
    lines = [{"step": s, "accuracy": s / 10, **({"heldout/accuracy": 0.5} if s == 3 else {})} for s in range(1, 6)]
    figure = svg(PLOTS[0], curves(lines, PLOTS[0]))
    shown = [(label, step, value) for _, _, label, step, value in figure["points"]]
    assert shown == [*(("training completions", s, s / 10) for s in range(1, 6)), ("held-out problems", 3, 0.5)]
    drawn = re.findall(r'<use xlink:href="[^"]*" x="([\d.]+)" y="([\d.]+)"', figure["inside"])
    places = [(float(x), float(y)) for x, y in drawn]
    for x, y, *_ in figure["points"]:  # above the marker of matplotlib
        assert any(abs(x - across) < 0.01 and abs(y - down) < 0.01 for across, down in places)
    steps = [float(step) for step in range(1000)]
    assert len(svg(PLOTS[1], [Curve("reward", steps, steps, [])])["points"]) == 167  # a sixth


def test_the_evaluation_after_training_replaces_a_smaller_one_of_its_step():
    lines = [{"step": 9, "heldout/accuracy": right / n, "heldout/n": n} for right, n in ((14, 16), (190, 256))]
    [heldout] = curves(lines, PLOTS[0])
    assert (heldout.steps, heldout.values, heldout.n) == ([9], [190 / 256], [256])


@pytest.mark.slow
def test_a_panel_is_drawn_only_where_the_history_has_its_metrics(run):
    (run / "plots").mkdir()
    (run / "plots/details.png").write_text("of an earlier report")
    files = report(run)
    # Reward, and accuracy from before.json and after.json.
    assert files.html.read_text(encoding="utf-8").count("<svg ") == 2
    assert [path.name for path in files.plots] == ["training.png"]
    assert not (run / "plots/details.png").exists()
