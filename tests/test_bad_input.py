"""Mistakes in recipes, files and options: one line, exit code 2, no traceback. Hostile text and broken streams too."""

import json
import os
import subprocess
import sys

import pytest

from grpo_math.cli import main
from grpo_math.system import streams
from grpo_math.system.reading import read_json
from grpo_math.system.yaml_files import read_yaml

PROGRAM = [sys.executable, "-m", "grpo_math.cli"]
BASE = "model_name_or_path: embedded\ndataset: generated\n"
GPU = ("--gpus", "1", "--gpu_memory", "24")
FILES = {
    "good.jsonl": '{"gold": "2", "prediction": "#### 2"}\n',
    "bad.jsonl": '{"gold": "2", "prediction": "#### 2"}\n{half',
    "deep.jsonl": f'{{"gold": "2", "prediction": {"[" * 100_000}',
    "digits.jsonl": f'{{"gold": "2", "prediction": {{"{"9" * 5000}}}',
    "format.jsonl": '{"gold": "2", "prediction": "2", "format": ["a"]}',
    "token.yaml": BASE + "hub_token: hf_secret: 1",
    "stage.json": '{"zero_optimization": {"stage": "two"}}',
    "offload.json": '{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}',
    "stage.yaml": BASE + "deepspeed: stage.json",
    "offload.yaml": BASE + "deepspeed: offload.json",
    "absent.yaml": BASE + "deepspeed: nowhere.json",
    "environment.yaml": BASE + "env: {'A=B': 1}\nuse_cpu: true\nbf16: false",
    "page.csv": "<!DOCTYPE html><html></html>",
    "book.ods": "PK\x03\x04",
    "frage.jsonl": '{"Frage": "Was ist 3 + 4?", "Loesung": "7"}',
    "empty.csv": "problem,answer\n",
    "open.csv": 'gold,prediction\n"7,#### 7\n',
    "runs/demo/config.yaml": "",
}
ACCELERATE = ["plan", "--config", "stage.yaml", *GPU, "--accelerate_config"]
TRAIN = ["train", "--output_dir", "x"]
COMMANDS = {
    "an unknown command": (["trian"], "did you mean 'train'?"),
    "an unknown option": (["grade", "good.jsonl", "--formt", "gsm8k"], "--formt"),
    "an option by the name of a setting": (["evaluate", "--model_name_or_path", "x"], "did you mean --model?"),
    "a setting by another program's name": ([*TRAIN, "--lora-rank", "1"], "did you mean --lora_r?"),
    "JSON in two ways": (["grade", "good.jsonl", "--json", "--jsonl"], "--json would be ignored by --jsonl"),
    "nothing to evaluate": (["evaluate", "--data", "generated"], "--model is missing"),
    "a run and a model": (
        ["evaluate", "--run", "x", "--model", "embedded", "--data", "generated"],
        "--model would be ignored by --run",
    ),
    **{
        f"{command[0]} with a folder that is misspelt": (
            command,
            "='runs/dmo' is not a folder: did you mean runs/demo?",
        )
        for command in (["ask", "runs/dmo", "1 + 1"], ["evaluate", "--model", "runs/dmo", "--data", "generated"])
    },
    "a report of what is no run": (["report", "nowhere"], "nowhere"),
    "a push of what is no run": (["push", "nowhere"], "run_dir='nowhere' is not a run that has finished"),
    "a recipe whose name is misspelt": (
        ["train", "demo_cp"],
        "config='demo_cp' is not known: did you mean 'demo_cpu'?",
    ),
    "a misspelt method": ([*TRAIN, "--method", "dapoo"], "method='dapoo' is not known: did you mean 'dapo'?"),
    "a misspelt reward": (["attack", "acuracy"], "did you mean 'accuracy'?"),
    "a misspelt data set": (["audit", "gms8k"], "did you mean 'gsm8k'?"),
    "a web page": (["audit", "page.csv"], "page.csv is a web page: download the file itself"),
    "a workbook": (["audit", "book.ods"], "book.ods is a workbook or an archive: save the sheet as 'CSV UTF-8'"),
    "columns of another language": (["audit", "frage.jsonl"], "give --columns problem=Frage,answer=Loesung"),
    "data without a row": (["audit", "empty.csv"], "dataset='empty.csv' has no rows"),
    "a split that is not there": (["audit", "math500"], "dataset_split='train' is not known: use one of test"),
    "clean rows as a table": (["audit", "--write_clean", "x.csv"], "write_clean='x.csv' is not a .jsonl file"),
    "settings after two dashes": (["plan", "demo_cpu", "--", "--seed", "1"], "-- is not an option of grpo-math plan"),
    "a misspelt model": (["ask", "embeded"], "target='embeded' is not a folder: did you mean 'embedded'?"),
    "a copy of a recipe that is not shipped": (["train", "--copy", "gsm8k_9gb"], "did you mean 'gsm8k_8gb'?"),
    "a recipe that is not there": (["plan", "--config", "no.yaml"], "no.yaml cannot be read (No such file"),
    "a recipe without a server": (
        ["serve", "--config", "launch/configs/demo_cpu.yaml"],
        "this recipe has no server to start: set use_vllm: true and vllm_mode: server",
    ),
    "a folder for a recipe": (["plan", "--config", "."], ". cannot be read (Is a directory)"),
    "data for a recipe": (["plan", "good.jsonl"], "good.jsonl is data, not a recipe: give --dataset good.jsonl"),
    "a token in a recipe": (["plan", "token.yaml"], "token.yaml cannot be read"),
    "a token in an option": (["push", "run", "--token=hf_secret"], "--token is not an option"),
    "a token of two words": ([*TRAIN, "--hub_token", "secret1", "secret2"], "--hub_token takes one value, not several"),
    "a token that is cut": ([*TRAIN, "--model_init_kwargs", '{"token": "secret1"'], "model_init_kwargs='***' is not a"),
    "a password in an address": (
        [*TRAIN, "--vllm_server_base_url", "http://ada:secret1@host:8000"],
        "base_url='http://***@host:8000'",
    ),
    "a variable that cannot be": ([*TRAIN, "--config", "environment.yaml"], "illegal environment variable name"),
    "a DeepSpeed file that is not there": ([*TRAIN, "--config", "absent.yaml"], "nowhere.json cannot be read (No such"),
    "a file whose name is misspelt": (["grade", "goood.jsonl"], "did you mean good.jsonl?"),
    "a file whose name has two lines": (["grade", "a\nb"], "a\\nb cannot be read (No such file or directory)"),
    "a file that is not JSON": (["grade", "bad.jsonl"], "bad.jsonl:2: row cannot be read"),
    "a quote without an end": (
        ["grade", "open.csv"],
        "open.csv:2: row cannot be read (unexpected end of data): correct",
    ),
    "text of a model that is nested deeply": (["grade", "deep.jsonl"], "deep.jsonl:1: row cannot be read (Recursion"),
    "a number of thousands of digits": (["grade", "digits.jsonl"], "digits.jsonl:1: row cannot be read ("),
    "a list for a format": (["grade", "format.jsonl"], "format.jsonl:1: format is ['a']: use one of"),
    "no time": (["grade", "good.jsonl", "--timeout", "nan"], "timeout=nan is out of range"),
    "nothing to grade": (["grade", "empty.csv"], "file='empty.csv' has no rows: check the file"),
    "an evaluation of no problem": (["evaluate", "--run", "runs/demo", "--n", "0"], "n=0 is not a number of problems"),
    **{
        f"{words[0]} below a file": ([*words, "good.jsonl/x.jsonl"], f"{words[-1][2:]}='good.jsonl/x.jsonl' cannot be")
        for words in (
            ["evaluate", "--model", "embedded", "--data", "generated", "--output"],
            ["audit", "--write_clean"],
        )
    },
    "GPUs for a CPU": (["plan", "demo_cpu", "--gpus", "2"], "gpus=2 contradicts use_cpu=True"),
    "a word for an address": (["selftest", "--vllm", "nowhere"], "vllm='nowhere' is not an address: give http://HOST"),
    "a very long option": (["grade", "good.jsonl", "--format", "x" * 100_000], "is not known: use one of"),
    "an accelerate config that is not there": (
        [*ACCELERATE, "zero9"],
        "accelerate_config='zero9' does not exist: give a file, or a name such as zero2",
    ),
    "ZeRO's stage in words": (["plan", "--config", "stage.yaml", *GPU], "stage.json cannot be read (ValueError"),
    "a word for a mapping": (["plan", "--config", "offload.yaml", *GPU], "offload.json cannot be read (AttributeError"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo").mkdir(parents=True)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_is_one_line_without_a_secret_and_leaves_nothing_behind(name, here, capsys):
    arguments, line = COMMANDS[name]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (err[:7], err.count("\n"), out) == ("error: ", 1, ""), err
    assert line in err
    assert len(err) < 2500
    assert "secret" not in err
    assert not (here / "x").exists()


@pytest.mark.parametrize(("name", "read"), [("a.yaml", read_yaml), ("a.json", read_json)])
def test_a_byte_order_mark_is_passed_over(name, read, here):
    (here / name).write_bytes(b'\xef\xbb\xbf{"seed": 1}')
    assert read(name) == {"seed": 1}


def test_a_reader_that_has_gone_is_no_error(here):
    theirs, ours = os.pipe()
    os.close(theirs)
    done = subprocess.run([*PROGRAM, "train", "--list"], stdout=ours, stderr=subprocess.PIPE, timeout=60)
    os.close(ours)
    assert (done.returncode, done.stderr) == (streams.CLOSED, b"")


def test_an_ascii_terminal_gets_json_all_the_same(here):
    (here / "pi.jsonl").write_text('{"gold": "é", "prediction": "#### é"}', encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    output = subprocess.check_output([*PROGRAM, "grade", "pi.jsonl", "--json"], env=environment, timeout=60)
    assert json.loads(output)["results"][0]["answer"] == "é"
