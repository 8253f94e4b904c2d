"""`grpo-math train` as a launcher, with real processes: stand-ins for nvidia-smi, vllm and, where named, the training.

Each stand-in writes down what it was started with. The list of processes says what is left running.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import SHEBANG, variables
from small_runs import TINY, history
from vllm_process import CPU
from waiting import adopting, alive, kill, until

from grpo_math.cli import main
from grpo_math.planner.devices import Layout
from grpo_math.run.machine import free_port
from grpo_math.train import serve

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

# A vLLM server as far as the launcher sees it: /health, /version, a grandchild in a session of its own, and a log.
# What it does besides is in the file named by STAND_IN: version, how it fails, and where to write its start down.
VLLM = """
import http.server, json, os, subprocess, sys, time
said = json.load(open(os.environ["STAND_IN"]))
mark = said["mark"]
grandchild = "import time; time.sleep(600)"
subprocess.Popen([{python!r}, "-c", grandchild, mark], start_new_session=True)
print("loading the weights of", sys.argv[2], flush=True)
line = {{"argv": sys.argv[1:], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid()}}
line["key"] = os.environ.get("VLLM_API_KEY")
with open(said["starts"], "a") as file:
    file.write(json.dumps(line) + "\\n")
if said.get("dies"):
    print("RuntimeError: the engine is broken", flush=True)
    sys.exit(1)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        healthy = not said.get("unhealthy")
        self.send_response(200 if healthy else 500)
        self.end_headers()
        if self.path == "/version":
            self.wfile.write(json.dumps({{"version": said.get("version", "0.31.0")}}).encode())

    def log_message(self, *args):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
# Training: it saves when it is asked to, and says what it was started with.
TRAINING = """
import json, os, pathlib, signal, sys, time
code = 130
def stop(number, frame):
    global code
    code = 75
    raise KeyboardInterrupt
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, stop)
said = json.load(open(os.environ["STAND_IN"]))
names = ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "VLLM_API_KEY")
line = {"argv": sys.argv[1:], "pid": os.getpid(), **{name: os.environ.get(name) for name in names}}
rank = os.environ.get("RANK", "0")
folder = pathlib.Path(said["folder"])
try:
    (folder / f"training.{rank}.json").write_text(json.dumps(line))
    time.sleep(said.get("trains", 0))
    if not said.get("leaves"):
        (folder / "run").mkdir(exist_ok=True)
        (folder / "run/finished.json").write_text("{}")
    sys.exit(0)
except KeyboardInterrupt:
    if said.get("stubborn"):
        time.sleep(600)
    time.sleep(1)  # the rest of its step
    server = json.loads(open(said["starts"]).readlines()[0])["pid"]
    (folder / f"checkpoint.{rank}").write_text(str(os.path.exists(f"/proc/{server}")))
    sys.exit(code)
"""
DRIVER = (
    "import sys\nfrom grpo_math.train import launcher\nfrom grpo_math.cli import main\n"
    "launcher.TRAINING = 'stand_in_training'\nsys.exit(main(sys.argv[1:]))"
)
RECIPE: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B",
    "dtype": "bfloat16",
    "use_peft": True,
    "lora_r": 16,
    "prompts_per_step": 16,
    "per_device_train_batch_size": 8,
    "use_vllm": True,
    "vllm_mode": "server",
}


class Machine:
    """A folder with a recipe, the stand-ins, and an environment in which they are found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.mark = folder, folder / "bin", f"mark-{os.getpid()}-{folder.name}"
        self.bin.mkdir()
        self.starts = folder / "starts.jsonl"
        (folder / "stand_in_training.py").write_text(TRAINING)
        self.environment = {**os.environ, "STAND_IN": str(folder / "says.json")}
        self.environment["PATH"] = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        self.environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
        for name in ("CUDA_VISIBLE_DEVICES", "GRPO_MATH_VLLM", "VLLM_API_KEY"):
            self.environment.pop(name, None)
        self.says()
        self.program("vllm", SHEBANG + VLLM.format(python=sys.executable))
        self.gpus(2)

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def says(self, **case: Any) -> None:
        extra = {"mark": self.mark, "starts": str(self.starts), "folder": str(self.folder)}
        (self.folder / "says.json").write_text(json.dumps({**extra, **case}))

    def gpus(self, n: int, gb: int = 80, used: str = "") -> None:
        rows = "\\n".join(f"{i}, GPU-{i}aa, {gb * 1024}, {4 if i else 5}" for i in range(n))
        self.program(
            "nvidia-smi", f'#!/bin/sh\ncase "$*" in *compute-apps*) printf "{used}";; *) printf "{rows}\\n";; esac\n'
        )

    def command(self, *arguments: Any, recipe: dict[str, Any] | None = None, command: str = "train") -> list[str]:
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump({**RECIPE, "output_dir": str(self.folder / "run"), **(recipe or {})}))
        # `serve` prefers port 8000, which another run of these tests may be about to take.
        port = ["--port", str(free_port())] if command == "serve" else []
        return [sys.executable, "-c", DRIVER, command, "--config", str(path), *port, *map(str, arguments)]

    def start(self, *arguments: Any, **kwargs: Any) -> subprocess.Popen[str]:
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": self.environment}
        return subprocess.Popen(self.command(*arguments, **kwargs), cwd=self.folder, **output)

    def run(self, *arguments: Any, **kwargs: Any) -> tuple[int, str, str]:
        process = self.start(*arguments, **kwargs)
        out, err = process.communicate(timeout=300)
        assert "Traceback" not in err, err
        assert self.left() == []
        return process.returncode, out, err

    def refused(self, *arguments: Any, **kwargs: Any) -> str:
        code, _, err = self.run(*arguments, **kwargs)
        assert code == 2, err
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert not (self.folder / "training.0.json").exists()
        return line

    def server(self) -> dict[str, Any]:
        return json.loads(self.starts.read_text().splitlines()[-1])

    def training(self, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"training.{rank}.json").read_text())

    def left(self) -> list[int]:
        """Processes of the server, of its grandchild, and of training that are still there."""
        pids = {*alive(self.mark), *alive(f"STAND_IN={self.environment['STAND_IN']}", "environ")}
        return sorted(pid for pid in pids if not ended(pid))


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path)
    with adopting():
        yield made
        kill(made.left())


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_training_that_ends_with_code_0_before_it_is_finished_has_failed(machine):
    machine.says(leaves=True)
    code, _, err = machine.run()
    assert code == 1
    assert err.splitlines()[-1].startswith("error: training ended with exit code 0 before it was finished")


LEAVING = """
import os
from grpo_math.cli import main
from grpo_math.train import program

def leave(*_):
    if not (child := os.fork()):
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
    os._exit(0)

program.main = leave
main(["train", "demo_cpu"])
"""


def test_os_exit_0_in_this_process_is_a_failure_and_in_a_forked_process_is_not(tmp_path):
    command = [sys.executable, "-c", LEAVING]
    done = subprocess.run(command, cwd=tmp_path, env=variables(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "0\n")
    assert done.stderr.splitlines()[-1].startswith("error: training ended with exit code 0 before it was finished")


def test_two_gpus_are_one_server_and_one_policy_and_the_server_ends_with_training(machine):
    code, out, err = machine.run("--learning_rate", "1e-5")
    assert code == 0, err
    server, training = machine.server(), machine.training()
    assert server["gpus"] == "0"
    assert training["CUDA_VISIBLE_DEVICES"] == "1"
    assert server["argv"][:2] == ["serve", "Qwen/Qwen2.5-1.5B"]
    assert option(server["argv"], "--max-lora-rank") == "16"
    assert option(training["argv"], "--learning_rate") == "1e-5"
    url = f"http://127.0.0.1:{option(server['argv'], '--port')}"
    assert option(training["argv"], "--vllm_server_base_url") == url
    assert "GPU 0: vLLM server; GPU 1: policy" in err
    assert "one GPU holds the server's weights" in err
    assert "vLLM 0.31.0 is ready" in err
    assert "loading the weights" in (machine.folder / "run/vllm_server.log").read_text()
    # The key is in the environment and nowhere else.
    assert len(server["key"]) == 32
    assert training["VLLM_API_KEY"] == server["key"]
    assert option(server["argv"], "--middleware") == "grpo_math_key.Guard"
    written = [path.read_text() for path in (machine.folder / "run").rglob("*") if path.is_file()]
    for text in (out, err, *written, *server["argv"], *training["argv"]):
        assert server["key"] not in text


def test_eight_gpus_start_as_many_processes_as_the_policy_has(machine):
    machine.gpus(8, gb=40)
    code, _, err = machine.run(recipe={"model_name_or_path": "Qwen/Qwen2.5-14B", "vllm_tensor_parallel_size": 2})
    assert code == 0, err
    assert option(machine.server()["argv"], "--tensor-parallel-size") == "2"
    assert option(machine.server()["argv"], "--data-parallel-size") == "2"
    assert machine.server()["gpus"] == "0,1,2,3"
    ranks = [machine.training(rank) for rank in range(4)]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"4,5,6,7"}
    assert "4 processes" in err


def test_full_fine_tuning_is_served_as_trl_serves_it(machine):
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    code, _, err = machine.run(recipe={"use_peft": False, "dtype": "float32", "vllm_max_model_length": 1024})
    assert code == 0, err
    argv = machine.server()["argv"]
    assert "--enable-lora" not in argv
    imposed = build_command(ScriptArguments(model="m"))
    for name in ("--weight-transfer-config", "--logprobs-mode", "--max-logprobs"):
        assert option(argv, name) == option(imposed, name)
    assert option(argv, "--max-model-len") == "1024"
    assert option(argv, "--dtype") == "auto", "not what the optimizer needs"


# What cannot work


def test_a_gpu_that_others_use_is_refused(machine):
    machine.gpus(2, used="GPU-1aa, 4711\\n")
    assert "GPU 1 is in use by process 4711: end that, or name other GPUs" in machine.refused()
    assert not machine.starts.exists()


def test_vllm_that_is_not_there_is_refused(machine):
    (machine.bin / "vllm").unlink()
    machine.environment["PATH"] = str(machine.bin) + ":/usr/bin:/bin"
    assert "vllm is not installed, and a vLLM server is to be started" in machine.refused()
    machine.environment["GRPO_MATH_VLLM"] = "/nowhere/vllm"
    assert "GRPO_MATH_VLLM='/nowhere/vllm' is not a program" in machine.refused()


def test_a_server_of_a_wrong_version_is_refused_and_stopped(machine):
    machine.says(version="0.19.1")
    assert "runs vLLM 0.19.1, which TRL 1.16 does not support: " in machine.refused()


def test_a_server_that_dies_shows_the_end_of_its_log(machine):
    machine.says(dies=True)
    code, _, err = machine.run()
    assert code == 2
    assert "  | RuntimeError: the engine is broken" in err
    assert "the vLLM server ended with exit code 1: 'RuntimeError: the engine is broken', its log" in err
    assert not (machine.folder / "training.0.json").exists()


def test_a_stated_port_has_to_be_free_and_another_is_found_for_the_preferred_one(machine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = machine.refused("--vllm_server_port", port)
        assert f"vllm_server_port={port} is in use by another program: choose another, or leave it out" in line
        assert serve.port_of({}, port) != port
    assert serve.port_of({}, port) == port
    assert serve.port_of({"vllm_server_port": port}, 0) == port


# How it ends


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_lets_training_save_before_the_server_ends(number, code, machine):
    machine.says(trains=600)
    machine.gpus(3)
    process = machine.start()
    until(lambda: all((machine.folder / f"training.{rank}.json").exists() for rank in (0, 1)))
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    for one in (0, 1):
        assert (machine.folder / f"checkpoint.{one}").read_text() == "True", "the server was there while it saved"
    assert machine.left() == []


def test_a_second_ctrl_c_ends_a_training_that_does_not_stop(machine):
    machine.says(trains=600, stubborn=True)
    process = machine.start()
    until((machine.folder / "training.0.json").exists)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(1)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert machine.left() == []


@pytest.mark.parametrize(
    ("number", "code", "when"), [(signal.SIGTERM, 75, "starting"), (signal.SIGKILL, -signal.SIGKILL, "training")]
)
def test_nothing_is_left_when_the_launcher_is_ended(number, code, when, machine):
    machine.says(trains=600, unhealthy=when == "starting")
    process = machine.start()
    until((machine.folder / "training.0.json").exists if when == "training" else machine.starts.exists)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == code
    until(lambda: not machine.left())


def test_a_server_that_is_killed_while_an_adapter_is_trained_is_started_again(machine):
    machine.says(trains=600)
    process = machine.start()
    until((machine.folder / "training.0.json").exists)
    os.kill(machine.server()["pid"], signal.SIGKILL)
    until(lambda: len(machine.starts.read_text().splitlines()) == 2)
    first, second = (json.loads(line) for line in machine.starts.read_text().splitlines())
    assert first["argv"] == second["argv"], "at the same address"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert "the vLLM server ended with exit code 137; started again" in err
    assert machine.left() == []


def test_a_server_that_dies_under_full_fine_tuning_ends_the_run(machine):
    machine.says(trains=600)
    process = machine.start(recipe={"use_peft": False})
    until((machine.folder / "training.0.json").exists)
    os.kill(machine.server()["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "error: the vLLM server ended with exit code 137" in err
    assert machine.left() == []


def test_serve_takes_every_gpu_until_it_is_ended(machine):
    process = machine.start(command="serve")
    until(lambda: machine.starts.exists() and machine.starts.read_text())
    assert option(machine.server()["argv"], "--data-parallel-size") == "2"
    assert machine.server()["gpus"] == "0,1"
    until(lambda: process.stderr is not None and "is ready" in process.stderr.readline())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert machine.left() == []


def test_serve_hands_vllm_what_follows_the_dashes_and_serves_what_quotes_and_yes_mean(machine):
    machine.says(dies=True)
    recipe = {"model_name_or_path": "some/model", "use_peft": "yes", "lora_r": 9, "vllm_tensor_parallel_size": 2}
    code, _, err = machine.run("--use_cpu", "--", "--max-num-seqs", "64", command="serve", recipe=recipe)
    assert code == 2
    assert "the vLLM server ended with exit code 1" in err
    argv = machine.server()["argv"]
    assert argv[:4] == ["serve", "some/model", "--host", "127.0.0.1"]
    assert argv[-2:] == ["--max-num-seqs", "64"]
    assert option(argv, "--max-lora-rank") == "16"
    assert option(argv, "--tensor-parallel-size") == "2"


def test_serve_without_a_key_is_for_this_machine_alone_and_says_who_can_use_it(machine):
    line = machine.refused("--host", "0.0.0.0", command="serve")
    assert "host='0.0.0.0' lets other machines use the server, which then needs a key: set VLLM_API_KEY" in line
    assert not machine.starts.exists()
    machine.says(dies=True)
    _, _, err = machine.run(command="serve")
    assert "warning: every user of this machine can use this server and change its weights: set VLLM_API_KEY" in err
    assert option(machine.server()["argv"], "--host") == "127.0.0.1"
    machine.environment["VLLM_API_KEY"] = "secret"
    _, _, err = machine.run("--host", "10.0.0.1", command="serve", recipe={"use_peft": False})
    assert "warning" not in err
    server = machine.server()
    assert (option(server["argv"], "--host"), server["key"]) == ("10.0.0.1", "secret")
    assert "secret" not in " ".join(server["argv"])


@pytest.mark.parametrize(
    ("recipe", "answer"), [({}, "adapter"), ({"use_peft": "no"}, "weights"), ({"vllm_mode": "colocate"}, "none")]
)
def test_serve_check_says_what_is_sent_to_the_server(recipe, answer, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **recipe}))
    assert main(["serve", "--check", "--config", str(path)]) == 0
    assert capsys.readouterr().out == f"{answer}\n"
    assert main(["serve", "--check", "--json", "--config", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"server": answer}


# Training itself, without stand-ins


@pytest.mark.full
def test_a_real_server_is_started_for_a_real_run_and_ended(tmp_path, smollm):
    if not os.environ.get("GRPO_MATH_VLLM"):
        pytest.skip("GRPO_MATH_VLLM names no vllm: launch/vllm_environment.sh makes one")
    extra = {"model_name_or_path": smollm, "dtype": "bfloat16", "vllm_max_model_length": 512, "max_steps": 2}
    recipe, run_dir = tmp_path / "recipe.yaml", tmp_path / "run"
    fields = {**RECIPE, **extra, "lora_dropout": 0.0, "output_dir": str(run_dir)}
    for name in ("prompts_per_step", "per_device_train_batch_size"):
        del fields[name]
    recipe.write_text(yaml.safe_dump(fields))
    command = [sys.executable, "-m", "grpo_math.cli", "train", "--config", str(recipe), *TINY]
    environment = {**os.environ, **CPU, "TEST_FOLDER": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in history(run_dir)] == [1, 2]
    assert "is ready" in done.stderr
    assert not [pid for pid in alive(f"TEST_FOLDER={tmp_path}", "environ") if not ended(pid)]


@pytest.mark.parametrize(("more", "adapters"), [({}, "1"), ({"staleness": 1}, "2")])
def test_the_server_takes_as_many_adapters_as_are_at_work(more, adapters, monkeypatch):
    monkeypatch.setattr(serve, "executable", lambda: "vllm")
    recipe = {"model_name_or_path": "base", "use_peft": True, "lora_r": 16, **more}
    command = serve.start_of(recipe, Layout("server", 1, 1, 1, ""), [], 8000).command
    assert command[command.index("--max-loras") + 1] == adapters
