"""The changes that CONTRIBUTING.md describes, carried out in a copy of the package, and a run that shows them."""

import json
import shutil
import sys

import pytest
from launching import ROOT, run

# A change -> (file, a text of it, what is put before this text); without a text the file is new.
CHANGES = {
    "reward": [
        ("rewards/functions.py", "def repetition", "def short(prompts, completions, **columns):\n"
         "    return [1.0 / (1 + len(completion_text(completion))) for completion in completions]\n\n\n"),
        ("rewards/functions.py", "        Shipped(r1_zero)", "        Shipped(short, needs_gold=False),\n"),
    ],
    "advantage": [
        ("algorithm/advantages.py", "Choice = Callable", "def largest(rewards: Tensor) -> Tensor:\n"
         "    return rewards.abs().amax(dim=1, keepdim=True).expand_as(rewards)\n\n\n"),
        ("algorithm/advantages.py", '    "mean": group_mean,', '    "largest": largest,\n'),
        ("settings/trl_fields.yaml", 'group, batch, centered_batch, mean, "none"]', "largest, "),
    ],
    "surrogate": [
        ("algorithm/losses.py", "SurrogateFunction = Callable",
         "def unclipped(inputs: LossInputs, ratio: Tensor, settings: LossSettings) -> Surrogate:\n"
         '    return Surrogate(-ratio * inputs.advantages, metrics={"unclipped": Metric(ratio)})\n\n\n'),
        ("algorithm/losses.py", '    "gmpo": gmpo,', '    "unclipped": unclipped,\n'),
        ("settings/loss.py", '    "gmpo": "epsilon', '    "unclipped": "",\n'),
        ("settings/loss.py", '"gmpo", "cispo", "dppo", "dppo_kl"', '"unclipped", '),
    ],
    "metric": [
        ("run/metrics.py", 'REWARD_MAX = "reward_max"', 'REWARD_MEDIAN = "reward_median"\n'),
        ("run/metrics.py", "    REWARD_MAX: Metric",
         '    REWARD_MEDIAN: Metric("reward", "median reward of the step", "rollout"),\n'),
        ("trainer/meter.py", "    if low <= high:", "    log[metrics.REWARD_MEDIAN] = rewards.nanmedian().item()\n"),
    ],
    "plot": [
        ("report/plots.py", '    Plot("KL to the reference"',
         '    Plot("Median reward", "Median of the reward.", ((metrics.REWARD_MEDIAN, "median"),)),\n'),
    ],
    "finding": [
        ("checks/symptoms.py", "def collapse", "def median_low(run: RunSeries) -> Symptom | None:\n"
         "    median = run.series(metrics.REWARD_MEDIAN).values\n"
         '    return Symptom(f"{median[-1]:.2f}", "temperature: 0.8") if median and median[-1] < 1 else None\n\n\n'),
        ("checks/diagnosis.py", '    "collapse": Symptom(',
         '    "median_low": Symptom("the median reward is low", "completions are long", "ask for short answers"),\n'),
    ],
    "rule": [
        ("settings/loss.py", "    # k2 without the ratio",
         '    Rule("warning", "beta", lambda s: s.beta > 1, "is above 1", "lower it"),\n'),
    ],
    "data set": [
        ("problems/sources.yaml", "numina_tir: {", "halves: {hub: me/halves, files: {train: halves.jsonl}}\n"),
    ],
    "setting": [
        ("settings/data.py", "    dataset_limit: int", '    greeting: str = setting("", "Printed first.")\n'),
        ("settings/data.py", '    Rule(\n        "no_effect",',
         '    Rule("warning", "greeting", lambda s: s.seed and "morning" in s.greeting, "is early", "wait"),\n'),
    ],
    "use of a setting": [
        ("train/program.py",
         '        if self.setup.problems.evaluation.before_and_after:\n            _say("2 of 3: training")',
         "        print(self.run.greeting)\n"),
    ],
    "command": [
        ("hello.py", None, "from grpo_math.system.streams import Answer\n\n\n"
         'def add_arguments(parser):\n    parser.add_argument("name")\n\n\n'
         'def run(args):\n    return Answer({"hello": args.name}, f"Hello {args.name}")\n'),
        ("cli.py", '    "report": Command(',
         '    "hello": Command("hello", "Greet.", "NAME", ("grpo-math hello you", "")),\n'),
    ],
}  # fmt: skip

RECIPE = """\
dataset: halves
rewards: [short]
scale_rewards: largest
greeting: Good morning
beta: 2.0
surrogate: unclipped
use_cpu: true
bf16: false
max_steps: 2
max_completion_length: 8
num_generations: 4
per_device_train_batch_size: 4
report_to: none
eval_n: 0
"""


@pytest.mark.full
def test_each_change_needs_at_most_three_files_and_shows_in_a_run(tmp_path, tiny):
    copy = tmp_path / "copy/grpo_math"
    shutil.copytree(ROOT / "grpo_math", copy)
    for name, edits in CHANGES.items():
        assert len({file for file, *_ in edits}) <= (1 if name in ("setting", "rule") else 3), name
        for file, position, text in edits:
            old = (copy / file).read_text() if position else ""
            assert position is None or old.count(position) == 1, f"{name}: {file} has not one {position!r}"
            (copy / file).write_text(old.replace(position, text + position) if position else text)
    rows = [{"problem": f"What is half of {2 * i}?", "answer": str(i)} for i in range(8)]
    (tmp_path / "halves.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "recipe.yaml").write_text(RECIPE + f"model_name_or_path: {tiny()}\noutput_dir: {tmp_path / 'run'}\n")

    def changed(*words: str, module: str = "grpo_math.cli") -> str:
        environment = {"PYTHONPATH": str(copy.parent), "GRPO_MATH_DATA": str(tmp_path)}
        return run([sys.executable, "-m", module, *words], cwd=tmp_path, **environment)

    assert "Good morning" in changed("--config", "recipe.yaml", module="grpo_math.train")
    lines = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert all(0 < line["reward_median"] <= 1 and "rewards/short/mean" in line for line in lines)
    assert all(line["unclipped"] == line["ratio"] for line in lines)
    page = json.loads(changed("report", "run", "--json"))
    assert "median_low" in {finding["check"] for finding in page["findings"]}
    assert "Median reward" in (tmp_path / "run/report.html").read_text()
    report = changed("doctor", "recipe.yaml")
    assert "beta=2.0 is above 1" in report
    assert "greeting='Good morning' is early. Remedy: wait" in report
    assert json.loads(changed("hello", "you", "--json")) == {"hello": "you"}
