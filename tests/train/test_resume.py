"""A run that is killed anywhere and started again ends as one that was not: weights, history and completions."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import launching
import pandas
import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from small_vllm import SmallVLLM

from grpo_math.errors import ConfigError
from grpo_math.report import verdict
from grpo_math.run import checkpoints, metrics
from grpo_math.train import program, resuming

PROGRAM = Path(__file__).parents[1] / "processes/killed.py"
TIMES = {metrics.SECONDS_STEP, metrics.SECONDS_UPDATE, metrics.TOKENS_PER_SECOND, metrics.MEMORY_RESIDENT}
TIMES |= {*metrics.PHASES, *metrics.OF_SERVERS, metrics.SYNC_SHARE}
KILLED = -signal.SIGKILL

# Two prompts of four completions a step, and eight problems: an epoch has four steps, and the run one and a half.
BASE = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "dataset": "generated:sums",
    "dataset_limit": 8,
    "rewards": "killed:noisy",
    "max_steps": 6,
    "save_steps": 2,
    "log_completions": True,
    "report_to": "none",
}
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear", "lora_dropout": 0.1}


SERVED = {**LORA, "use_vllm": True, "vllm_mode": "server", "eval_n": 0}  # by a stand-in, `served`


def arguments(model: str, run_dir: Path, settings: dict) -> list[str]:
    settings = {**BASE, "model_name_or_path": model, "output_dir": run_dir, **settings}
    return [f"--{name}={value}" for name, value in settings.items()]


def program_of(jobs: list[dict], folder: Path, *launch: str) -> subprocess.CompletedProcess[str]:
    """Run killed.py with these jobs, in the processes that ``launch`` starts."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = launching.variables(PYTHONPATH=f"{launching.ROOT}:{PROGRAM.parent}")
    command = [*launch, str(PROGRAM), str(folder / "jobs.json")]
    return subprocess.run(command, env=environment, cwd=launching.ROOT, capture_output=True, text=True)


def runs(jobs: list[dict], folder: Path) -> list[int]:
    """The exit codes of these jobs, one after the other."""
    done = program_of(jobs, folder, sys.executable)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def left(run_dir: Path) -> dict:
    """What a run ends with, without what depends on the clock."""
    weights = next(path for path in (run_dir / "model", run_dir / "adapter") if path.exists())
    lines = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    tables = sorted((run_dir / "completions").glob("*.parquet"))
    reference = run_dir / "checkpoint-6/reference/weights.safetensors"
    return {
        "weights": {path.name: path.read_bytes() for path in weights.glob("*.safetensors")},
        "history": [{name: value for name, value in line.items() if name not in TIMES} for line in lines],
        "completions": {path.name: pandas.read_parquet(path).to_json() for path in tables},
        "reference": reference.read_bytes() if reference.exists() else None,
        "optimizer": optimizer(run_dir / "checkpoint-6/optimizer.pt"),
    }


def optimizer(path: Path) -> list[list[float]]:
    state = torch.load(path, weights_only=True)["state"] if path.exists() else {}
    return [torch.cat([x.flatten().float() for x in part.values()]).tolist() for _, part in sorted(state.items())]


def same(run_dir: Path, whole: Path) -> None:
    ours, theirs = left(run_dir), left(whole)
    assert theirs["weights"]
    assert theirs["history"]
    for name in theirs:
        assert ours[name] == theirs[name], name


# Settings, and the places at which a run of them is killed: the place, and for the how manyth time it is met.
KINDS = {
    "lora": (LORA, [("update", 6), ("checkpoint", 3), ("sealing", 2), ("rotation", 4), ("lines", 6)]),
    "all that a checkpoint keeps, in one run": (
        {
            "num_iterations": 2,
            "save_steps": 1,
            "resample_groups": 1,
            "reference_refresh_steps": 2,
            "beta": 0.1,
            "use_adaptive_entropy": True,
            "entropy_target": 5.0,
            "entropy_coef": 0.01,
            "heldout_every": 2,
            "heldout": '{"data": "generated:sums", "n": 4}',
            "eval_split": "heldout",
            "eval_n": 4,
        },
        [("update", 7)],  # a rollout is half trained on
    ),
    "with a tool": (
        {**LORA, "tools": "python", "prompt_template": "python", "max_completion_length": 40, "eval_n": 0},
        [("call", 11)],
    ),
    "one step off policy, dynamic sampling": (
        {**SERVED, "staleness": 1, "resample_groups": 1, "save_steps": 1},
        [("update", 5)],
    ),
}


@pytest.fixture
def served(tiny):
    """The settings of a kind, with the address of a stand-in for vLLM where it samples from one."""
    small = SmallVLLM(tiny())
    yield lambda kind: {**kind, "vllm_server_base_url": small.url} if kind.get("use_vllm") else kind
    small.stop()


@pytest.mark.full(keep=["all that a checkpoint keeps"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_as_one_that_was_not(kind, tiny, served, tmp_path):
    settings, names = served(KINDS[kind][0]), KINDS[kind][1]
    jobs = [{"arguments": arguments(tiny(), tmp_path / "whole", settings)}]
    for position, time in names:
        again = arguments(tiny(), tmp_path / f"{position}-{time}", settings)
        jobs += [{"arguments": again, "place": position, "time": time}, {"arguments": again}]
    codes = runs([{**job, "output": str(tmp_path / "output")} for job in jobs], tmp_path)
    output = (tmp_path / "output").read_text()
    ended = dict(zip([("whole", 0), *(name for name in names for _ in "ab")], codes, strict=True))
    assert codes == [0, *[KILLED, 0] * len(names)], (ended, output[-3000:])
    for position, time in names:
        same(tmp_path / f"{position}-{time}", tmp_path / "whole")


FAILING = {
    "full, in the middle of an epoch": ({}, {"nan": 3}),
    "lora, dynamic sampling, a rollout over several steps": (
        {**LORA, "resample_groups": 1, "steps_per_generation": 6, "dataset_limit": 12},
        {"fails": 3},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", FAILING)
def test_a_run_that_failed_within_a_step_ends_as_one_that_did_not(kind, tiny, tmp_path):
    """What saves it has drawn random numbers, and logged the rollout that is drawn again."""
    settings, fault = FAILING[kind]
    whole, again = (
        {"arguments": arguments(tiny(), tmp_path / name, {**settings, "save_steps": 100, "max_nonfinite_steps": 1})}
        for name in ("whole", "failed")
    )
    jobs = [{**job, "output": str(tmp_path / "output")} for job in (whole, again | fault, again)]
    codes = runs(jobs, tmp_path)
    output = (tmp_path / "output").read_text()
    assert codes == [0, 2, 0], output[-3000:]
    assert "Traceback" not in output
    assert f"Going on from {tmp_path}/failed/checkpoint-{next(iter(fault.values()))}" in output
    same(tmp_path / "failed", tmp_path / "whole")


@pytest.mark.full
def test_two_processes_under_zero2_go_on_bit_by_bit(tiny, tmp_path):
    settings = {**LORA, "num_iterations": 2, "save_steps": 1, "max_steps": 6}
    settings |= {"per_device_train_batch_size": 2}
    command = launching.accelerate("zero2", tmp_path, "--num_processes", "2")
    for name, position in (("whole", {}), ("killed", {"place": "update", "time": 6}), ("killed", {})):
        job = {"arguments": arguments(tiny(), tmp_path / name, settings), **position}
        done = program_of([job], tmp_path, *command)
        assert (done.returncode == 0) == (not position), done.stderr[-3000:]
    assert "Going on from" in done.stderr
    assert {path.name for path in (tmp_path / "killed/checkpoint-6").glob("state_*")} == {"state_0.pt", "state_1.pt"}
    same(tmp_path / "killed", tmp_path / "whole")


SETS = [{"data": "generated:products", "n": 8}, {"data": "generated:sums", "n": 4, "samples": 2, "temperature": 1.0}]


@pytest.mark.full
def test_two_processes_under_zero3_keep_their_best_checkpoint_and_its_metrics(tiny, tmp_path):
    """Evaluated by a stand-in for vLLM, and killed as the best checkpoint is named."""
    server, asked = SmallVLLM(tiny()), []
    server.sampling = lambda body: asked.append(body) if "seed" in body and body["n"] == 1 else None
    settings = {**SERVED, "vllm_server_base_url": server.url, "per_device_train_batch_size": 2, "eval_n": 4}
    settings |= {"heldout_every": 1, "keep_best": True, "save_steps": 3, "save_total_limit": 1, "max_steps": 4}
    command = launching.accelerate("zero3", tmp_path, "--num_processes", "2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run_dir, place in ((whole, {}), (killed, {"place": "best.json", "time": 2}), (killed, {})):
        words = [*arguments(tiny(), run_dir, settings), "--heldout", *map(json.dumps, SETS)]
        done = program_of([{"arguments": words, "graded_by_letters": True, **place}], tmp_path, *command)
        assert (done.returncode == 0) == (not place), done.stderr[-3000:]
        if run_dir == whole:
            # Once for both processes: 8 problems and 2 samples of 4 at each step; 4 before, after, and with the best.
            assert len(asked) == 4 * (8 + 2 * 4) + 3 * 4
            best = json.loads((whole / checkpoints.BEST).read_text())
            assert 1 < best["step"] < 4
            assert f"best     checkpoint-{best['step']}: " in done.stdout
            served = get_peft_model_state_dict([*server.adapters.values()][-1])
            of_best = load_file(whole / best["path"] / "adapter_model.safetensors")
            assert all(torch.equal(served[name], of_best[name]) for name in served.keys() | of_best.keys())
    server.stop()
    same(killed, whole)
    for run_dir in (whole, killed):
        assert json.loads((run_dir / checkpoints.BEST).read_text()) == best
        assert [step for step, _ in checkpoints.checkpoints(run_dir)] == [4, best["step"]]
        assert (run_dir / "heldout-0.jsonl").read_text() == (run_dir / "heldout-1.jsonl").read_text()


@pytest.mark.full
def test_a_ddp_run_of_two_processes_is_resumed_by_one_and_not_by_three(tiny, tmp_path):
    """The same problems and as many completions in a step; sampling draws other random numbers."""
    settings = {**LORA, "prompts_per_step": 2, "num_generations": 4, "save_steps": 2, "max_steps": 2}
    settings |= {"per_device_train_batch_size": 2}

    def trained(processes, **more):
        words = arguments(tiny(), tmp_path / "run", settings | more)
        words = [word for word in words if not word.startswith("--gradient_accumulation_steps")]
        return program_of([{"arguments": words}], tmp_path, *[*launching.TORCHRUN[:-1], str(processes)])

    assert trained(2).returncode == 0
    for processes, steps, line in ((1, 4, "1 in place of 2"), (2, 6, "2 in place of 1")):
        done = trained(processes, max_steps=steps, resume="force")
        assert done.returncode == 0, done.stderr[-3000:]
        assert line in done.stderr
    history = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in history if "loss" in line] == [1, 2, 3, 4, 5, 6]
    refused = trained(3, max_steps=8, resume="force")
    assert "which 3 processes cannot share evenly: use 3, or start 1, 2, 4 or 8 processes" in refused.stderr


# Which checkpoint, and whether it is the same run


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """A finished run of two steps with a checkpoint of each, on problems of its own."""
    folder = tmp_path_factory.mktemp("finished")
    rows = [{"id": f"p{i}", "problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(8)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {**LORA, "max_steps": 2, "save_steps": 1, "dataset": folder / "problems.jsonl", "eval_n": 0}
    sys.path.insert(0, str(PROGRAM.parent))  # for the reward
    assert program.main(arguments(small, folder / "run", settings)) == 0
    yield folder, settings
    sys.path.remove(str(PROGRAM.parent))


@pytest.fixture
def again(finished, small, tmp_path, capfd, monkeypatch):
    """Starts a copy of it again, with some settings changed: (exit code, its lines on stderr)."""
    source, settings = finished
    monkeypatch.setattr(verdict, "print_verdict", lambda *_: None)  # half of a short run's time
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)

    def start(**changed) -> tuple[int, list[str]]:
        capfd.readouterr()
        code = program.main(arguments(small, tmp_path / "run", {**settings, **changed}))
        return code, capfd.readouterr().err.splitlines()

    return start


def contents(folder: Path) -> dict[str, bytes]:
    """All but the report, which is made anew."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name: (folder / name).read_bytes() for name in names if not name.startswith(("report", "plots"))}


def test_a_finished_run_is_not_run_again(again, tmp_path):
    before = contents(tmp_path / "run")
    code, lines = again()
    assert (code, lines[-1]) == (0, f"The run in {tmp_path}/run is finished; name a new output_dir for another.")
    assert contents(tmp_path / "run") == before


def cut(run_dir: Path, *names: str) -> None:
    for name in names:
        (run_dir / name).write_bytes((run_dir / name).read_bytes()[:-1])


def edit(run_dir: Path, old: str = "", new: str = "") -> None:
    (run_dir / "finished.json").unlink()
    (run_dir / "config.yaml").write_text((run_dir / "config.yaml").read_text().replace(old, new))


def without_a_whole_checkpoint(run_dir: Path) -> None:
    edit(run_dir)
    cut(run_dir, "checkpoint-1/trainer_state.json", "checkpoint-2/state_0.pt")


def without_a_checkpoint(run_dir: Path) -> None:
    for name in ("finished.json", "checkpoint-1", "checkpoint-2"):
        (run_dir / name).rename(run_dir / f"other-{name}")


def with_a_garbage_state(run_dir: Path) -> None:
    (run_dir / "checkpoint-1/files.json").unlink()
    (run_dir / "checkpoint-1/trainer_state.json").write_bytes(bytes(range(256)) * 64)


@pytest.mark.parametrize(
    ("change", "settings", "line"),
    [
        (
            edit,
            {"learning_rate": 1e-3, "epsilon": 0.3},
            "output_dir='RUN' holds a run with other settings (epsilon: 0.2 -> 0.3; learning_rate: 0.01 -> 0.001): "
            "name a new folder, give the settings that it had, or add --resume force to go on with these",
        ),
        (
            edit,
            {"lora_r": 8, "resume": "force"},
            "output_dir='RUN' holds a run whose checkpoints do not fit these settings (lora_r: 4 -> 8): name a new "
            "folder, or give the settings that it had",
        ),
        (
            lambda run_dir: edit(run_dir, "distributed_type: 'NO'", "distributed_type: DEEPSPEED"),
            {"resume": "force"},
            "output_dir='RUN' holds a run whose checkpoints do not fit these settings (distributed_type: DEEPSPEED -> "
            "NO): name a new folder, or give the settings that it had",
        ),
        (
            lambda run_dir: edit(run_dir, "num_processes: 1", "num_processes: 2"),
            {},
            "num_processes=1 cannot resume checkpoint-2, which 2 wrote (the recipe does not state prompts_per_step, "
            "and another number of processes would change it): start 2 processes",
        ),
        (
            lambda run_dir: (run_dir / "config.yaml").write_text("learning_rate: 1.0\n"),
            {},
            "output_dir='RUN' holds a run that cannot be continued, since its config.yaml does not say what it was",
        ),
        (
            lambda run_dir: (run_dir / "problems.txt").write_text("another\n"),
            {},
            "output_dir='RUN' holds a run with other settings (the dataset: 1 problems -> 8 problems, not all",
        ),
        (
            without_a_whole_checkpoint,
            {},
            "RUN/checkpoint-2 is damaged (state_0.pt is not what was written); RUN/checkpoint-1 is damaged "
            "(trainer_state.json is not what was written); no complete one is left: name a new output_dir",
        ),
        (
            without_a_checkpoint,
            {"resume_from_checkpoint": True},
            "resume_from_checkpoint='True' finds no checkpoint in RUN: leave it out",
        ),
        (
            lambda run_dir: cut(run_dir, "checkpoint-1/optimizer.pt"),
            {"resume_from_checkpoint": "RUN/checkpoint-1"},
            "resume_from_checkpoint='RUN/checkpoint-1' is damaged (optimizer.pt is not what was written): give another "
            "checkpoint",
        ),
        (
            with_a_garbage_state,
            {"resume_from_checkpoint": "RUN/checkpoint-1", "output_dir": "RUN/../other"},
            "resume_from_checkpoint='RUN/checkpoint-1' ",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused_in_one_line_and_nothing_is_changed(change, settings, line, again, tmp_path):
    run_dir = tmp_path / "run"
    change(run_dir)
    before = contents(run_dir)
    code, lines = again(**{name: str(value).replace("RUN", str(run_dir)) for name, value in settings.items()})
    assert code == 2
    assert lines[-1].startswith(f"error: {line}".replace("RUN", str(run_dir)))
    assert contents(run_dir) == before


def test_force_goes_on_with_other_settings(again, tmp_path):
    code, lines = again(max_steps=3, resume="force")
    assert (code, lines[0]) == (0, f"Going on from {tmp_path}/run/checkpoint-2.")
    assert (tmp_path / "run/checkpoint-3").is_dir()
    assert json.loads((tmp_path / "run/finished.json").read_text())["step"] == 3
    assert [json.loads(line)["step"] for line in (tmp_path / "run/history.jsonl").open()] == [1, 2, 3]


@pytest.mark.parametrize("named", [False, True])
def test_a_damaged_checkpoint_is_passed_over_and_one_may_be_named(named, again, finished, tmp_path):
    run_dir, name = tmp_path / "run", "adapter/adapter_model.safetensors"
    if named:
        code, lines = again(resume_from_checkpoint=run_dir / "checkpoint-1")
    else:
        (run_dir / checkpoints.FINISHED).unlink()
        cut(run_dir, "checkpoint-2/optimizer.pt")
        code, (warning, *lines) = again()
        damaged = f"warning: {run_dir}/checkpoint-2 is damaged (optimizer.pt is not what was written)"
        assert warning == f"{damaged}: continuing from {run_dir}/checkpoint-1"
    assert (code, lines[0]) == (0, f"Going on from {run_dir}/checkpoint-1.")
    assert {path.name for path in run_dir.glob("*checkpoint-2")} == {"checkpoint-2", "old-checkpoint-2"}
    assert (run_dir / name).read_bytes() == (finished[0] / "run" / name).read_bytes()


# A step of 8 completions, which 2 processes wrote.
HELD = {"num_generations": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_iterations": 1}
HELD |= {"generation_batch_size": 8, "num_processes": 2, "stated": {"prompts_per_step": 2}}


@pytest.mark.parametrize(
    ("held", "now", "reason"),
    [
        ({}, {"world_size": 1, "gradient_accumulation_steps": 4}, ""),
        ({"distributed_type": "MULTI_GPU"}, {"world_size": 4, "gradient_accumulation_steps": 1}, ""),
        ({"num_processes": 4}, {"world_size": 4, "gradient_accumulation_steps": 9}, ""),
        ({}, {"world_size": 1}, "a step of 8 completions is to be shared evenly, and 8 are generated at a time"),
        ({"distributed_type": "FSDP"}, {"world_size": 1, "gradient_accumulation_steps": 4}, "its optimizer is divided"),
        ({"num_iterations": 2}, {"world_size": 1, "gradient_accumulation_steps": 4}, "it lies within a rollout, of"),
        ({"stated": {}}, {"world_size": 1, "gradient_accumulation_steps": 4}, "the recipe does not state prompts_per"),
    ],
)
def test_another_number_of_processes_resumes_if_it_shares_the_same_completions(held, now, reason, capsys):
    config, held = SimpleNamespace(**{**HELD, **now}), {**HELD, **held}
    if reason:
        with pytest.raises(ConfigError, match=f"cannot resume checkpoint-3, which 2 wrote .{reason}") as error:
            resuming._refuse_processes(held, config, 3)
        every = "1, 2, 4 or 8" if reason.startswith("a step") else "2"
        assert str(error.value).endswith(f": start {every} processes")
    else:
        resuming._refuse_processes(held, config, 3)
        line = f"{now['world_size']} in place of 2 processes: sampling draws other random numbers from here on.\n"
        assert capsys.readouterr().err == ("" if held["num_processes"] == now["world_size"] else line)
