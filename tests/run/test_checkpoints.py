"""Checkpoints: how they are written, which one a run resumes from, and if the run in a folder is the same run."""

import contextlib
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_math.errors import ConfigError, UserError
from grpo_math.run import checkpoints, earlier, files, resume, weights
from grpo_math.settings.run_settings import RunSettings


def accelerator(events=None, main=True):
    return SimpleNamespace(is_main_process=main, wait_for_everyone=lambda: events is None or events.append("all ranks"))


def written(folder, contents):
    with checkpoints.sealed(folder, accelerator()):
        for name, text in contents.items():
            (folder / name).write_text(text)
    return folder


def checkpoint(run_dir, step):
    return written(
        run_dir / f"checkpoint-{step}", {"state_0.pt": "state", "trainer_state.json": f'{{"global_step": {step}}}'}
    )


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_power_failure_at_any_moment_leaves_an_unfinished_checkpoint_or_a_whole_one(tmp_path, monkeypatch):
    """What reaches the disk, in this order: the token, the files, their list, the end of the token."""
    events, folder = [], tmp_path / "run/checkpoint-1"
    for module in (checkpoints, files):
        monkeypatch.setattr(module, "flush", lambda path: events.append((path.name, checkpoints.unfinished(folder))))
    with checkpoints.sealed(folder, accelerator(events)):
        (folder / "more").mkdir()
        for name in ("b", "a", "more/c"):
            (folder / name).write_text(name)
        assert checkpoints.damage(folder) == "it was not written to its end"
        events.append("filled")
    assert events == [
        *(("..checkpoint-1.unfinished.part", False), ("run", True), "all ranks", "filled", "all ranks"),
        *((name, True) for name in ("a", "b", "c", ".files.json.part", "checkpoint-1")),
        *(("run", False), "all ranks"),
    ]
    assert json.loads((folder / checkpoints.FILES).read_text()) == {"a": 1, "b": 1, "more/c": 6}


def test_no_file_of_a_checkpoint_stays_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    checkpoint(tmp_path, 1)
    assert os.listdir("/proc/self/fd") == before


def test_a_checkpoint_that_was_not_written_to_its_end_is_deleted_and_one_of_an_earlier_run_is_replaced_whole(tmp_path):
    folder = written(tmp_path / "checkpoint-1", {"old": "old"})
    assert set(tree(written(folder, {"new": "new"}))) == {"new", checkpoints.FILES}
    with contextlib.suppress(OSError), checkpoints.sealed(tmp_path / "checkpoint-2", accelerator()):
        raise OSError("full")
    assert [step for step, _ in checkpoints.checkpoints(tmp_path)] == [1]
    assert resume.script_checkpoint(tmp_path, None) is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert [resume.script_checkpoint(tmp_path / "new", asked) for asked in (True, False)] == [True, False]


def test_another_machine_neither_seals_nor_deletes(tmp_path):
    """On NFS it sees what was there a minute ago. The main process may have sealed, replaced or deleted the folder."""
    folder, events = checkpoint(tmp_path, 1), []
    before = tree(tmp_path)
    with checkpoints.sealed(folder, accelerator(events, main=False)):
        events.append("filled")
    assert tree(tmp_path) == before
    assert events == ["all ranks", "filled", "all ranks", "all ranks"]


def test_damaged_checkpoints_are_passed_over_and_later_steps_are_set_aside(tmp_path):
    one, two, ten = (checkpoint(tmp_path, step) for step in (1, 2, 10))
    (ten / "state_0.pt").write_text("")
    assert checkpoints.newest_whole(tmp_path) == (
        two,
        [f"{ten} cannot be resumed (state_0.pt is not what was written)"],
    )
    assert [resume.script_checkpoint(tmp_path, asked) for asked in (True, str(one))] == [str(ten), str(one)]
    for step in (2, 10):
        (tmp_path / f"evaluation-checkpoint-{step}").mkdir()
    earlier.archive_later_checkpoints(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("checkpoint-1", "checkpoint-2", "earlier", "evaluation-checkpoint-2")
    ]
    assert {path.name for path in tmp_path.glob("earlier/1/*")} == {"checkpoint-10", "evaluation-checkpoint-10"}
    (one / "state_0.pt").unlink()
    written(two, {"model": ""})
    with pytest.raises(UserError) as error:
        checkpoints.newest_whole(tmp_path)
    assert str(error.value) == (
        f"{two} cannot be resumed (it contains only weights (save_only_model)); {one} cannot be resumed (state_0.pt is "
        "not what was written); no complete one is left: name a new output_dir"
    )


def test_a_checkpoint_is_named_by_its_folder_or_as_the_best(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint='best' is not known: .* was trained without keep_best: "):
        checkpoints.named(tmp_path, "best")
    folder = checkpoint(tmp_path, 7)
    (tmp_path / checkpoints.BEST).write_text('{"path": "checkpoint-7"}')
    assert checkpoints.named(tmp_path, "best") == checkpoints.named(tmp_path, "checkpoint-7") == folder
    (tmp_path / checkpoints.BEST).write_text('{"path": "checkpoint-5"}')
    with pytest.raises(ConfigError, match=r"no longer has checkpoint-5: name one of checkpoint-7$"):
        checkpoints.named(tmp_path, "best")
    (tmp_path / ".checkpoint-7.unfinished").touch()
    with pytest.raises(ConfigError, match="checkpoint='checkpoint-7' is not a checkpoint of"):
        checkpoints.named(tmp_path, "checkpoint-7")


@pytest.mark.parametrize("state", ["", "[7]", "{}", '{"global_step": null}', '{"global_step": 1e999}'])
def test_a_checkpoint_without_its_step_is_refused(state, tmp_path):
    folder = checkpoint(tmp_path, 7)
    assert checkpoints.checkpoint_step(folder) == 7
    (folder / "trainer_state.json").write_text(state)
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint=.* has no trainer_state.json with its step"):
        checkpoints.checkpoint_step(folder)


def test_the_weights_of_a_run_are_in_a_folder_or_in_the_run_itself(tmp_path):
    for kind, folder in (("model", tmp_path), ("adapter", tmp_path), ("model", tmp_path / "model")):
        folder.mkdir(exist_ok=True)
        (folder / "x.safetensors").touch()
        (folder / weights.MARKS[kind]).touch()
        assert weights.weights_in(tmp_path) == (kind, folder)
    (tmp_path / ".model.unfinished").touch()
    assert weights.weights_in(tmp_path) == ("adapter", tmp_path)
    (tmp_path / "x.safetensors").unlink()
    assert weights.weights_in(tmp_path) is None


@pytest.mark.parametrize(
    ("plugins", "config", "split", "kinds"),
    [
        ({}, {"fsdp": "", "deepspeed_plugin": None}, "", set()),
        ({"fsdp_plugin": 1}, {"fsdp": "full_shard", "deepspeed_plugin": None}, "FSDP", {"FSDP"}),
        ({"deepspeed_plugin": 2}, {"fsdp": "", "deepspeed_plugin": 2}, "", {"DEEPSPEED"}),
        ({"deepspeed_plugin": 3}, {"fsdp": "", "deepspeed_plugin": 3}, "ZeRO-3", {"DEEPSPEED"}),
    ],
)
def test_who_splits_the_weights_and_keeps_the_optimizer(plugins, config, split, kinds):
    state = {name: SimpleNamespace(zero_stage=stage) for name, stage in plugins.items()}
    assert weights.split_by(SimpleNamespace(state=SimpleNamespace(**state))) == split
    assert weights.checkpoint_kinds(SimpleNamespace(**config)) == kinds


# The same run


def test_a_named_checkpoint_is_of_this_run_or_starts_it(tmp_path):
    run_dir, other = tmp_path / "run", checkpoint(tmp_path / "other", 1)
    assert [resume.where_to_start(run_dir, asked) for asked in (None, False, True, "true", "False")] == 5 * [
        (None, run_dir, None)
    ]
    assert resume.where_to_start(run_dir, other)[:2] == (other, other.parent)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(f"stated: {{resume_from_checkpoint: {other}}}")
    assert resume.where_to_start(run_dir, other)[:2] == (other, other.parent), (
        "it was killed before its first checkpoint"
    )
    (run_dir / "config.yaml").write_text("stated: {}")
    with pytest.raises(ConfigError, match=r"output_dir='.*' contains another run: name a new folder"):
        resume.where_to_start(run_dir, other)
    mine = checkpoint(run_dir, 1)
    assert resume.where_to_start(run_dir, other)[:2] == (None, run_dir), "its own checkpoints are newer"
    assert resume.where_to_start(run_dir, str(mine))[:2] == (mine, run_dir)
    (run_dir / "config.yaml").write_text(f"stated: {{resume_from_checkpoint: {mine}}}")
    assert resume.where_to_start(run_dir, str(mine))[:2] == (None, run_dir), "it has started from there, and goes on"
    second = checkpoint(run_dir, 2)
    assert resume.where_to_start(run_dir, str(second))[:2] == (second, run_dir)


def test_other_settings_are_listed():
    kept = resume.explicit_settings(RunSettings({"hub_token": "hf_x", "seed": 1, "beta": 0.1}))
    now = {"seed": 1, "hub_token": "hf_y", "save_steps": 9, "lora_r": 8, "rewards": ["accuracy"]}
    lines = ["beta: 0.1 -> 0.0", "lora_r: 16 -> 8"]
    assert resume.changed({"stated": kept}, RunSettings(now)) == lines
    # `force` does not change the shape of the adapter.
    with pytest.raises(ConfigError, match=re.escape("(lora_r: 16 -> 8): name a new folder")):
        resume.refuse_changed(Path("run"), lines, "force")
    resume.refuse_changed(Path("run"), lines[:1], "force")


def test_problems_are_the_same_under_another_id_and_not_with_another_answer(tmp_path):
    rows = [{"id": i, "problem": f"{i} + 1?", "answer": str(i + 1)} for i in range(3)]
    hashes = resume.problem_hashes(rows)
    assert resume.changed_problems(tmp_path, hashes) == []
    resume.write_problems(tmp_path, hashes)
    assert resume.changed_problems(tmp_path, resume.problem_hashes({**row, "id": "x"} for row in rows)) == []
    assert resume.changed_problems(tmp_path, resume.problem_hashes([*rows[:2], {**rows[2], "answer": "4"}])) == [
        "the dataset: 3 problems -> 3 problems, not all the same"
    ]
