"""A run that is killed anywhere and started again ends as one that was not: weights, history and completions."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import launching
import pandas
import pytest
import torch
from accelerate import PartialState
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from small_runs import history
from small_vllm import SmallVLLM

from grpo_math.errors import ConfigError
from grpo_math.run import checkpoints, metrics
from grpo_math.train import program, resuming

PROGRAM = Path(__file__).parents[1] / "processes/killed.py"
TIMES = {
    *metrics.PHASES,
    *metrics.SERVER_SECONDS,
    metrics.SECONDS_STEP,
    metrics.SECONDS_UPDATE,
    metrics.SYNC_SHARE,
    metrics.TOKENS_PER_SECOND,
    metrics.MEMORY_RESIDENT,
}

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


def arguments(model, run_dir, settings):
    settings = {**BASE, "model_name_or_path": model, "output_dir": run_dir, **settings}
    return [f"--{name}={value}" for name, value in settings.items()]


def program_of(jobs, folder, *launch, ok=True):
    """Run killed.py with these jobs, in the processes that ``launch`` starts."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = launching.variables(PYTHONPATH=f"{launching.ROOT}:{PROGRAM.parent}")
    command = [*launch, str(PROGRAM), str(folder / "jobs.json")]
    done = subprocess.run(command, env=environment, cwd=launching.ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == ok, done.stderr[-3000:]
    return done


def left(run_dir):
    """What a run ends with, without what depends on the clock."""
    weights = next(path for path in (run_dir / "model", run_dir / "adapter") if path.exists())
    tables = sorted((run_dir / "completions").glob("*.parquet"))
    reference = run_dir / "checkpoint-6/reference/weights.safetensors"
    state = run_dir / "checkpoint-6/optimizer.pt"
    parts = torch.load(state, weights_only=True)["state"].values() if state.exists() else ()
    history_lines = [
        {name: value for name, value in line.items() if name not in TIMES and not name.endswith("_runtime")}
        for line in history(run_dir)
    ]
    return {
        "weights": {path.name: path.read_bytes() for path in weights.glob("*.safetensors")},
        "history": history_lines,
        "completions": {path.name: pandas.read_parquet(path).to_json() for path in tables},
        "reference": reference.read_bytes() if reference.exists() else None,
        "optimizer": [torch.cat([x.flatten().float() for x in part.values()]).tolist() for part in parts],
    }


def same(run_dir, whole):
    ours, theirs = left(run_dir), left(whole)
    assert theirs["weights"]
    assert theirs["history"]
    for name in theirs:
        assert ours[name] == theirs[name], name


# Settings, and how a run of them ends too soon: killed at a place that is met for the how manyth time, or by an error
# from a step on. What saves a run that failed within a step has drawn random numbers, and logged the rollout that is
# drawn again.
KINDS = {
    "lora": (
        LORA,
        [
            {"place": place, "time": time}
            for place, time in {"update": 6, "checkpoint": 3, "sealing": 2, "rotation": 4, "lines": 6}.items()
        ],
    ),
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
        [{"place": "update", "time": 7}],  # a rollout is half trained on
    ),
    "one step off policy, dynamic sampling": (
        {**SERVED, "staleness": 1, "resample_groups": 1, "save_steps": 1},
        [{"place": "update", "time": 5}],
    ),
    "lora, failing, dynamic sampling, a rollout over several steps": (
        {**LORA, "save_steps": 100, "resample_groups": 1, "steps_per_generation": 6, "dataset_limit": 12},
        [{"fails": 3}],
    ),
}


@pytest.mark.slow
@pytest.mark.full(keep=["all that a checkpoint keeps"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_as_one_that_was_not(kind, small, server, tmp_path):
    settings, faults = KINDS[kind]
    settings = {**settings, **({"vllm_server_base_url": server.url} if "use_vllm" in settings else {})}
    jobs = [{"arguments": arguments(small, tmp_path / "whole", settings)}]
    for number, fault in enumerate(faults):
        again = {"arguments": arguments(small, tmp_path / str(number), settings)}
        jobs += [again | fault, again]
    done = program_of([{**job, "output": str(tmp_path / "output")} for job in jobs], tmp_path, sys.executable)
    expected = [0, *(code for fault in faults for code in (-signal.SIGKILL if "place" in fault else 2, 0))]
    assert [int(line) for line in done.stdout.split()] == expected, (tmp_path / "output").read_text()[-3000:]
    assert "Traceback" not in (tmp_path / "output").read_text()
    for number in range(len(faults)):
        same(tmp_path / str(number), tmp_path / "whole")


SETS = [{"data": "generated:products", "n": 8}, {"data": "generated:sums", "n": 4, "samples": 2, "temperature": 1.0}]


@pytest.mark.full
def test_two_processes_under_zero3_go_on_bit_by_bit_with_their_best_checkpoint_and_its_metrics(tiny, tmp_path):
    """Evaluated by a stand-in for vLLM, and killed as the best checkpoint is named, in the middle of a rollout."""
    asked, server = [], SmallVLLM(tiny())
    server.sampling = lambda body: asked.append(body) if "seed" in body and body["n"] == 1 else None
    settings = {
        **SERVED,
        "vllm_server_base_url": server.url,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "num_iterations": 2,
        "eval_n": 4,
        "heldout_every": 1,
        "keep_best": True,
        "save_steps": 3,
        "save_total_limit": 1,
    }
    command = launching.accelerate("zero3", tmp_path, "--num_processes", "2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run_dir, place in ((whole, {}), (killed, {"place": "best.json", "time": 2}), (killed, {})):
        words = [*arguments(tiny(), run_dir, settings), "--heldout", *map(json.dumps, SETS)]
        program_of([{"arguments": words, "graded_by_letters": True, **place}], tmp_path, *command, ok=not place)
        if run_dir == whole:
            # Once for both processes: 8 problems and 2 samples of 4 at each step; 4 before, after, and with the best.
            assert len(asked) == 4 * (8 + 2 * 4) + 3 * 4
            best = json.loads((whole / checkpoints.BEST).read_text())
            assert 1 < best["step"] < 4
            served = get_peft_model_state_dict([*server.adapters.values()][-1])
            of_best = load_file(whole / best["path"] / "adapter_model.safetensors")
            assert all(torch.equal(served[name], of_best[name]) for name in served.keys() | of_best.keys())
    same(killed, whole)
    assert {path.name for path in (killed / "checkpoint-4").glob("state_*")} == {"state_0.pt", "state_1.pt"}
    for run_dir in (whole, killed):
        assert json.loads((run_dir / checkpoints.BEST).read_text()) == best
        assert [step for step, _ in checkpoints.checkpoints(run_dir)] == [4, best["step"]]
        assert (run_dir / "heldout-0.jsonl").read_text() == (run_dir / "heldout-1.jsonl").read_text()
    server.stop()


@pytest.mark.full
def test_a_ddp_run_of_two_processes_is_resumed_by_one(small, tmp_path):
    """The same problems and as many completions in a step; sampling draws other random numbers."""
    settings = {**LORA, "prompts_per_step": 2, "per_device_train_batch_size": 2, "save_steps": 2}
    for processes, steps, line in ((2, 2, ""), (1, 4, "1 in place of 2")):
        words = arguments(small, tmp_path / "run", {**settings, "max_steps": steps, "resume": "force"})
        words = [word for word in words if not word.startswith("--gradient_accumulation_steps")]
        done = program_of([{"arguments": words}], tmp_path, *launching.TORCHRUN[:-1], str(processes))
        assert line in done.stderr
    assert [line["step"] for line in history(tmp_path / "run") if "loss" in line] == [1, 2, 3, 4]


# Which checkpoint, and whether it is the same run


FINISHED = {
    **LORA,
    "max_steps": 2,
    "save_steps": 1,
    "eval_n": 2,
    "eval_split": "heldout",
    "rewards": "small_trainers:letters",
}


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """A finished run of two steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished")
    assert program.main(arguments(small, folder / "run", FINISHED)) == 0
    return folder


@pytest.fixture
def again(finished, small, tmp_path, capfd):
    """Starts a copy of it again, with some settings changed: (exit code, its lines on stderr)."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)

    def start(**changed):
        capfd.readouterr()
        code = program.main(arguments(small, tmp_path / "run", {**FINISHED, **changed}))
        return code, capfd.readouterr().err.splitlines()

    return start


def contents(folder):
    """All but the report, which is made anew."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".html", ".png"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_finished_run_is_not_run_again(again, tmp_path):
    before = contents(tmp_path / "run")
    (tmp_path / "run/adapter/README.md").unlink()  # as if the end had failed, such as a push
    code, lines = again()
    assert (code, lines[-1]) == (0, f"The run in {tmp_path}/run is finished; name a new output_dir for another.")
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(("changed", "publishes"), [({}, True), ({"dry_run": True, "resume": "force"}, False)])
def test_all_ranks_end_the_process_group_before_the_main_process_publishes(
    changed, publishes, again, tmp_path, monkeypatch
):
    """Also if the run was finished already, and in a dry run."""
    report, published = tmp_path / "run/report.html", []
    report.unlink()
    monkeypatch.setattr(PartialState, "destroy_process_group", lambda _: published.append(report.exists()))
    assert again(**changed)[0] == 0
    assert (published, report.exists()) == ([False], publishes)


def cut(run_dir, name):
    (run_dir / name).write_bytes((run_dir / name).read_bytes()[:-1])


def edit(run_dir, old="", new=""):
    (run_dir / "finished.json").unlink()
    (run_dir / "config.yaml").write_text((run_dir / "config.yaml").read_text().replace(old, new))


@pytest.mark.parametrize(
    ("change", "settings", "line"),
    [
        (
            edit,
            {"learning_rate": 1e-3, "epsilon": 0.3},
            "output_dir='RUN' contains a run with other settings (epsilon: 0.2 -> 0.3; learning_rate: 0.01 -> 0.001): "
            "name a new folder, give the settings that it had, or add --resume force to continue with these",
        ),
        (
            lambda run_dir: edit(run_dir, "distributed_type: 'NO'", "distributed_type: DEEPSPEED"),
            {"resume": "force"},
            "output_dir='RUN' contains a run whose checkpoints do not fit these settings (distributed_type: DEEPSPEED "
            "-> NO): name a new folder, or give the settings that it had",
        ),
        (
            edit,
            {"resume": "force", "lora_r": 8},
            "output_dir='RUN' contains a run whose checkpoints do not fit these settings (lora_r: 4 -> 8): name a new",
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
            "output_dir='RUN' contains a run that cannot be continued: its config.yaml does not record the recipe",
        ),
        (
            lambda run_dir: (run_dir / "problems.txt").write_text("another\n"),
            {},
            "output_dir='RUN' contains a run with other settings (the dataset: 1 problems -> 8 problems, not all",
        ),
        (
            bool,
            {"resume_from_checkpoint": True, "output_dir": "RUN/../other"},
            "resume_from_checkpoint='True' finds no checkpoint in RUN/../other: leave it out",
        ),
        (
            lambda run_dir: cut(run_dir, "checkpoint-1/optimizer.pt"),
            {"resume_from_checkpoint": "RUN/checkpoint-1"},
            "resume_from_checkpoint='RUN/checkpoint-1' cannot be resumed (optimizer.pt is not what was written): give "
            "another checkpoint",
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


def test_force_goes_on_with_other_settings_and_keeps_the_newest_checkpoint_whatever_the_clock_says(again, tmp_path):
    tomorrow = time.time() + 86_400
    os.utime(tmp_path / "run/checkpoint-2", (tomorrow, tomorrow))
    code, lines = again(max_steps=3, resume="force", save_total_limit=1)
    assert code == 0
    assert [step for step, _ in checkpoints.checkpoints(tmp_path / "run")] == [3]
    assert f"Resuming from {tmp_path}/run/checkpoint-2." in lines
    assert [line for line in lines if " of 3: " in line] == ["2 of 3: training", "3 of 3: evaluating after training"]
    assert json.loads((tmp_path / "run/finished.json").read_text())["step"] == 3
    assert [line["step"] for line in history(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "settings", "printed"),
    [
        (bool, {"resume_from_checkpoint": "RUN/checkpoint-1"}, "Resuming from RUN/checkpoint-1."),
        (
            lambda run_dir: [edit(run_dir), cut(run_dir, "checkpoint-2/optimizer.pt")],
            {},
            "warning: RUN/checkpoint-2 cannot be resumed (optimizer.pt is not what was written): continuing from "
            "RUN/checkpoint-1\nmoved    checkpoint-2 to RUN/earlier/1\nResuming from RUN/checkpoint-1.",
        ),
    ],
    ids=["named", "damaged"],
)
def test_a_damaged_checkpoint_is_passed_over_and_one_may_be_named(change, settings, printed, again, finished, tmp_path):
    run_dir, name = tmp_path / "run", "adapter/adapter_model.safetensors"
    change(run_dir)
    code, lines = again(**{name: value.replace("RUN", str(run_dir)) for name, value in settings.items()})
    assert code == 0
    assert printed.replace("RUN", str(run_dir)) in "\n".join(lines)
    assert [*run_dir.glob("earlier/1/checkpoint-2"), *run_dir.glob("checkpoint-2")] == [
        run_dir / "earlier/1/checkpoint-2",
        run_dir / "checkpoint-2",
    ]
    assert (run_dir / name).read_bytes() == (finished / "run" / name).read_bytes()


# A step of 8 completions, which 2 processes wrote.
HELD = {
    "num_generations": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_iterations": 1,
    "generation_batch_size": 8,
    "num_processes": 2,
    "stated": {"prompts_per_step": 2},
}


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
        every = "1, 2, 4 or 8" if reason.startswith("a step") else "2"
        line = f"cannot resume checkpoint-3, which 2 wrote .{reason}.*: start {every} processes$"
        with pytest.raises(ConfigError, match=line):
            resuming._refuse_processes(held, config, 3)
    else:
        resuming._refuse_processes(held, config, 3)
        line = f"{now['world_size']} in place of 2 processes: sampling draws other random numbers from here on.\n"
        assert capsys.readouterr().err == ("" if held["num_processes"] == now["world_size"] else line)
