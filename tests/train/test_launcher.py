"""`grpo-math train` as a launcher, with real processes: stand-ins for nvidia-smi, vllm and, where named, the training.

Each stand-in writes down what it was started with. The list of processes says what is left running.
"""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import launching
import pytest
import yaml
from small_runs import history
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from trl.scripts.vllm_serve import ScriptArguments, build_command
from vllm_process import CPU
from waiting import adopting, alive, until

from grpo_math.cli import main
from grpo_math.errors import ConfigError
from grpo_math.generation import vllm_env, vllm_server
from grpo_math.planner.devices import Layout
from grpo_math.run.files import write_json
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.gpus import Gpu
from grpo_math.system.machine import free_port, versions
from grpo_math.system.signals import STOPPING, handling
from grpo_math.train import launcher, layout, ranks, serve

# A vLLM server as far as the launcher sees it: /health, /version, a grandchild in a session of its own, and a log.
# The file named by STAND_IN holds its version, and if it dies.
VLLM = """
import http.server, json, os, subprocess, sys
said = json.load(open(os.environ["STAND_IN"]))
subprocess.Popen([{python!r}, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("loading the weights of", sys.argv[2], flush=True)
names = ("CUDA_VISIBLE_DEVICES", "VLLM_API_KEY")
line = {{"argv": sys.argv[1:], "pid": os.getpid(), **{{name: os.environ.get(name) for name in names}}}}
with open("server.jsonl", "a") as file:
    file.write(json.dumps(line) + "\\n")
if said.get("dies"):
    print("RuntimeError: the engine is broken", flush=True)
    sys.exit(1)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/version":
            self.wfile.write(json.dumps({{"version": said.get("version", "0.32.0")}}).encode())

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
names = ("CUDA_VISIBLE_DEVICES", "VLLM_API_KEY")
line = {"argv": sys.argv[1:], "pid": os.getpid(), **{name: os.environ.get(name) for name in names}}
try:
    pathlib.Path("training.jsonl").write_text(json.dumps(line) + "\\n")
    time.sleep(said.get("trains", 0))
    sys.exit(0)
except KeyboardInterrupt:
    pathlib.Path("asked").touch()
    if said.get("stubborn"):
        time.sleep(600)
    time.sleep(0.3)  # the rest of its step
    server = json.loads(open("server.jsonl").readlines()[0])["pid"]
    pathlib.Path("checkpoint").write_text(str(os.path.exists(f"/proc/{server}")))
    sys.exit(code)
"""
RECIPE = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B",
    "dataset": "generated:sums",
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


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of two GPUs with the stand-ins, in a folder that is the current one."""
    (tmp_path / "stand_in_training.py").write_text(TRAINING)
    paths = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{launching.ROOT}"}
    os.environ.update(paths, STAND_IN=str(tmp_path / "says.json"))
    for name in ("CUDA_VISIBLE_DEVICES", "GRPO_MATH_VLLM", "VLLM_API_KEY"):
        os.environ.pop(name, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "TRAINING", "stand_in_training")
    monkeypatch.setattr(layout, "versions", dict)  # no DeepSpeed
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.05)))  # until a server answers
    says()
    launching.write_program(tmp_path / "bin/vllm", launching.SHEBANG + VLLM.format(python=sys.executable))
    gpus(2)
    with adopting(os.environ["STAND_IN"]):
        yield


def says(**case):
    write_json(Path("says.json"), case)


def gpus(n, used=""):
    rows = (f"{i}, GPU-{i}aa, {80 * 1024}, {40 * 1024 if f'GPU-{i}' in used else 0}\\n" for i in range(n))
    launching.nvidia_smi(Path("bin"), "".join(rows), used)


def run(*arguments, then=bool, recipe=(), command="train"):
    """Run the command in this process, and return its exit code. ``then`` runs in a thread meanwhile."""
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "output_dir": "run", **dict(recipe)}))
    with ThreadPoolExecutor(1) as threads:
        meanwhile = threads.submit(then)
        try:
            code = main([command, "--config", "recipe.yaml", *arguments])
        except SystemExit as ended:
            code = ended.code
        meanwhile.result()
    assert left() == []
    return code


def started(name, times=1):
    """Wait for as many starts of "server" or "training"; return what each was started with."""
    file = Path(f"{name}.jsonl")
    until(lambda: file.exists() and file.read_text().count("\n") == times)
    return [json.loads(line) for line in file.read_text().splitlines()]


def left():
    """Processes of the server, of its grandchild, and of training that are still there."""
    return alive(os.environ["STAND_IN"])


def option(argv, name):
    return argv[argv.index(name) + 1]


def test_two_gpus_are_one_server_and_one_policy_and_the_server_ends_with_training(machine, capfd):
    assert run("--learning_rate", "1e-5") == 0
    (out, err), (served,), (training,) = capfd.readouterr(), started("server"), started("training")
    log = Path("run/vllm_server.log").read_text()
    assert (served["CUDA_VISIBLE_DEVICES"], training["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    url = f"http://127.0.0.1:{option(served['argv'], '--port')}"
    assert training["argv"][-4:] == ["--learning_rate", "1e-5", "--vllm_server_base_url", url]
    assert "GPU 0: vLLM server; GPU 1: policy (one GPU holds the server's weights and a sequence)" in err
    assert "error" not in err
    assert "loading the weights" in log
    # The key is in the environment and nowhere else.
    assert len(served["VLLM_API_KEY"]) == 32
    assert training["VLLM_API_KEY"] == served["VLLM_API_KEY"]
    assert option(served["argv"], "--middleware") == "grpo_math_key.ApiKeyMiddleware"
    assert served["VLLM_API_KEY"] not in "".join([out, err, log, *served["argv"], *training["argv"]])


def test_the_server_is_started_as_trl_starts_it_and_as_the_recipe_loads_the_model(monkeypatch):
    def server_command(model, **settings):
        return vllm_server.ServerSettings(model=model, **settings).command()

    def command(recipe, gpus, **more):
        cards = [Gpu(number, 80.0, "") for number in range(gpus)]
        return serve.server_start(
            RunSettings({**RECIPE, **recipe}), Layout("server", 1, gpus, 1, ""), cards, 8000, **more
        )[0]

    monkeypatch.setattr(serve, "executable", lambda supported: "vllm")
    full, imposed = command(FULL, 1), build_command(ScriptArguments(model="m"))
    for name in ("--weight-transfer-config", "--logprobs-mode", "--max-logprobs"):
        assert option(full, name) == option(imposed, name)
    model = RECIPE["model_name_or_path"]
    # The dtype is not what the optimizer needs.
    assert full == server_command(model, max_model_length=1024)
    assert command({"dtype": "float32", "staleness": 1, "seed": 7}, 0) == server_command(
        model, dtype="float32", lora_rank=16, adapters=2, seed=7, on_gpu=False
    )
    assert command({}, 1) == server_command(model, dtype="bfloat16", lora_rank=16)
    assert option(command({}, 1), "--max-model-len") == "auto"
    quantised = command({"model_revision": "v2", "load_in_4bit": True, "dtype": None}, 2, more=["--x"])
    assert option(quantised, "--quantization") == "bitsandbytes"
    assert quantised == server_command(
        model, data_parallel=2, lora_rank=16, in_4bit=True, extra=["--revision", "v2", "--x"]
    )


# What cannot work


@pytest.mark.parametrize(
    ("change", "words", "recipe", "line"),
    [
        (bool, ["--gpus", "3"], {}, "gpus=3 cannot be had: 2 GPUs are visible here: give 1 to 2"),
        (bool, ["--gpus", "0"], {}, "gpus=0 cannot be had: 2 GPUs are visible here: give 1 to 2"),
        (bool, ["--gpus", "1"], {"use_cpu": True}, "gpus=1 contradicts use_cpu=True: leave one of them out"),
        (bool, ["--gpus", "1"], {}, "vllm_mode='server' needs 1 separate GPU, and 1 is visible: set vllm_mode to col"),
        (bool, ["--accelerate_config", "multi_node"], {}, "accelerate_config='multi_node' is for several machines, "),
        (
            lambda: Path("two.yaml").write_text("num_processes: 2\ngpu_ids: '0,1'\n"),
            ["--accelerate_config", "two.yaml"],
            {},
            "accelerate_config='two.yaml' sets gpu_ids: leave them out, and set CUDA_VISIBLE_DEVICES",
        ),
        (bool, ["--accelerate_config", "zero2"], {}, "accelerate_config='zero2' needs DeepSpeed, which is not install"),
        (
            lambda: gpus(2, used="GPU-1aa, 4711, /bin/python\\n"),
            *([], {}, "GPU 1 is in use by process 4711 (python) with 40.0 GB: end that, or name other GPUs"),
        ),
        (
            Path("bin/vllm").unlink,
            *(
                [],
                {},
                "vllm is not installed, and a vLLM server is to be started: make an environment for it: "
                "export GRPO_MATH_VLLM=$(grpo-math serve --make_env)",
            ),
        ),
        (
            lambda: os.environ.update(GRPO_MATH_VLLM="/nowhere/vllm"),
            *([], {}, "GRPO_MATH_VLLM='/nowhere/vllm' is not a program"),
        ),
        (
            lambda: says(version="0.19.1"),
            *([], {}, "http://127.0.0.1:PORT runs vLLM 0.19.1, which is not supported for adapters: "),
        ),
        (
            lambda: says(dies=True),
            *([], {}, "the vLLM server ended with exit code 1: 'RuntimeError: the engine is broken', its log"),
        ),
    ],
)
def test_what_cannot_work_is_refused_before_training(change, words, recipe, line, machine, capfd):
    change()
    assert run(*words, recipe=recipe) == 2
    assert f"error: {line}" in re.sub(r"1:\d+ ", "1:PORT ", capfd.readouterr().err)
    assert not Path("training.jsonl").exists()
    assert Path("server.jsonl").exists() == line.startswith(("http://", "the vLLM server"))


def test_a_stated_port_has_to_be_free_and_another_is_found_for_the_preferred_one(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"vllm_server_port={port} is in use by another program: choose another"):
            serve.choose_port(port, 0)
        assert serve.choose_port(None, port) != port
    assert serve.choose_port(None, port) == serve.choose_port(port, 0) == port
    for free, words in ((True, []), (False, ["--vllm_group_port"])):
        monkeypatch.setattr(serve, "port_is_free", lambda number, free=free: free or number != 51216)
        assert serve.group_port(RunSettings({**RECIPE, **FULL}))[:1] == words
        assert (
            serve.group_port(RunSettings(RECIPE)) == serve.group_port(RunSettings({**FULL, "vllm_group_port": 1})) == []
        )


@pytest.mark.parametrize(("recipe", "engines"), [(RECIPE, 4), ({**RECIPE, **FULL}, 1)])
def test_a_server_of_a_model_that_cannot_be_planned_has_an_engine_on_each_gpu_if_adapters_are_sent(recipe, engines):
    layout = serve._layout(
        RunSettings({**recipe, "attn_implementation": "eager"}), [Gpu(number, 24.0, "") for number in range(4)]
    )
    assert (layout.server, layout.data_parallel) == (4, engines)


# Without a server


@pytest.mark.parametrize(
    ("count", "words", "recipe", "lines"),
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
    count, words, recipe, lines, machine, capfd, monkeypatch
):
    trained = Mock(return_value=3)
    monkeypatch.setattr("grpo_math.train.program.main", trained)
    gpus(count)
    assert run(*words, recipe={"use_vllm": False, **recipe}) == 3
    assert trained.call_args.args[0] == ["--config", "recipe.yaml"]
    printed = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("layout", "plan", "config"))]
    assert bool(printed) == bool(lines)
    assert all(any(line.startswith(start) for line in printed) for start in lines)
    visible = ("0", "PCI_BUS_ID") if lines else (None, None)
    assert (os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")) == visible


@pytest.mark.parametrize(
    ("words", "processes", "expected"),
    [
        ([], None, "GPU-0aa"),
        ([], "1", "GPU-0aa"),
        ([], "2", None),
        (["--use_cpu"], None, None),
        (["--model_init_kwargs", '{"device_map": "auto"}'], None, None),  # as asked
    ],
)
def test_a_single_process_of_accelerate_sees_one_gpu(words, processes, expected, machine, monkeypatch):
    gpus(2)
    trained = Mock(return_value=0)
    monkeypatch.setattr("grpo_math.train.program.main", trained)
    monkeypatch.setattr(sys, "argv", ["train", *words])
    if processes:
        monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(SystemExit):
        runpy.run_module("grpo_math.train", run_name="__main__")
    trained.assert_called_once_with(words)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected


def test_a_desktop_next_to_training_is_a_warning_and_a_slice_is_named_by_its_uuid(machine, capsys):
    cards = [Gpu(0, 7.4, "", shared_with="process 7 (kwin_wayland)"), Gpu(1, 9.0, "", uuid="MIG-c")]
    layout.refuse_used(cards)
    assert capsys.readouterr().err == "warning: GPU 0 is also used by process 7 (kwin_wayland)\n"
    assert layout.environment(cards)["CUDA_VISIBLE_DEVICES"] == "0,MIG-c"


def test_the_accelerate_config_is_the_one_named_or_the_first_that_fits(capfd, tmp_path):
    def arranged(gpus, config, **recipe):
        return layout.choose_layout(
            RunSettings({**RECIPE, **recipe}), [Gpu(number, 24.0, "") for number in range(gpus)], config
        )

    assert arranged(2, None, use_vllm=False, **FULL)[1].path.stem == "zero2"
    plan, config = arranged(2, None, use_vllm=False)
    assert (plan.policy, config.path.stem) == (2, "multi_gpu")
    assert "config   multi_gpu, 2 processes\n" in capfd.readouterr().err
    assert arranged(2, "single_gpu", use_vllm=False)[0].policy == 1
    words = launcher._training(["--x"], config, 2)
    assert [*words[1:-4], *words[-3:]] == [
        *("-m", "grpo_math.train.ranks", "--config_file", str(config.path), "--num_processes", "2"),
        *("--main_process_port", "-m", launcher.TRAINING, "--x"),
    ]
    plan, config = arranged(0, "multi_gpu")
    assert (plan[:4], config.path.stem) == (("server", 2, 0, 1), "multi_gpu")
    # The plan does not know FSDP.
    assert arranged(3, "fsdp2")[0] == ("server", 2, 1, 1, "the plan cannot compute this recipe's memory", 0)
    (tmp_path / "mine.yaml").write_text("main_process_port: 7\n")
    plan, config = arranged(0, str(tmp_path / "mine.yaml"))
    assert plan.policy == 1
    assert launcher._training([], config, 1)[3:] == [
        *("--config_file", str(config.path), "--num_processes", "1", "-m", launcher.TRAINING)
    ]


def failed(*ranks):
    """What torch raises if the ranks ended with these exit codes at these times."""
    ended = enumerate(ranks)
    return ChildFailedError("", {rank: Mock(exitcode=c, timestamp=t, pid=10 + rank) for rank, (c, t) in ended})


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        (None, 0, ""),
        (subprocess.CalledProcessError(2, "python"), 2, ""),
        (subprocess.CalledProcessError(-9, "python"), 137, "error: training was ended by SIGKILL (dmesg tells"),
        (failed((69, 2), (-9, 3)), 137, "error: rank 1 (process 11) was ended by SIGKILL (dmesg tells"),
        (failed((69, 2), (69, 1)), 69, ""),
        (failed((2, 5), (1, 4)), 1, ""),
    ],
)
def test_the_process_that_failed_first_gives_the_code_and_a_killed_one_is_named(
    failure, code, line, monkeypatch, capfd
):
    """The ranks themselves: tests/run/test_failures.py."""
    monkeypatch.setattr("accelerate.commands.launch.launch_command", Mock(side_effect=failure))
    with handling((signal.SIGINT, *STOPPING), signal.SIG_DFL):
        assert ranks.main(["-m", "some.module"]) == code
        for number, expected in ((signal.SIGINT, 130), (signal.SIGUSR1, 75)):
            with pytest.raises(SystemExit, match=str(expected)):
                signal.raise_signal(number)  # no process has started yet
    err = capfd.readouterr().err
    assert err.startswith(line)
    assert err.count(": the same command continues from the last checkpoint\n") == len(err.splitlines()) == bool(line)


@pytest.mark.parametrize(
    ("words", "line"),
    [([], "gsm8k_8gb"), (["--list", "--seed", "1"], "gsm8k_8gb"), (["--help-all"], "--vllm_importance_sampling_mode")],
)
def test_train_prints_what_is_shipped_and_starts_nothing(words, line, capsys):
    assert main(["train", *words]) == 0
    text = capsys.readouterr().out
    assert line in text
    # Each field is listed once, without its spelling with hyphens.
    assert not re.search("^  --.* --[a-z]", text, re.MULTILINE)


# How it ends


@pytest.mark.parametrize(
    ("numbers", "stubborn", "code"),
    [([signal.SIGINT], False, 130), ([signal.SIGTERM], False, 75), ([signal.SIGINT, signal.SIGINT], True, 130)],
)
def test_a_signal_lets_training_save_before_the_server_ends_and_a_second_ctrl_c_ends_it(
    numbers, stubborn, code, machine
):
    def stop():
        started("training")
        for number in numbers:
            os.kill(os.getpid(), number)
            until(Path("asked").exists)

    says(trains=600, stubborn=stubborn)
    assert run(then=stop) == code
    # The server was there while training saved.
    assert stubborn or Path("checkpoint").read_text() == "True"


@pytest.mark.parametrize(
    ("killed", "recipe", "code", "line"),
    [
        ("server", {}, 130, "the vLLM server ended with exit code 137; started again"),
        ("server", FULL, 2, "error: the vLLM server ended with exit code 137"),
        ("training", {}, 137, "error: training was ended by SIGKILL: the same command starts it again"),
    ],
    ids=["server with an adapter", "server with weights", "training"],
)
def test_a_killed_process_is_named_and_a_server_is_started_again_if_it_can_get_the_adapter(
    killed, recipe, code, line, machine, capfd, monkeypatch
):
    # Training needs vLLM to send all weights.
    monkeypatch.setattr("grpo_math.system.machine.versions", lambda: {**versions(), "vllm": "0.31.0"})

    def end():
        started("training")
        os.kill(started(killed)[0]["pid"], signal.SIGKILL)
        if code == 130:
            starts = started("server", 2)
            assert starts[0]["argv"] == starts[1]["argv"], "at the same address"
            os.kill(os.getpid(), signal.SIGINT)

    says(trains=600)
    assert run(then=end, recipe=recipe) == code
    assert line in capfd.readouterr().err


# serve


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_serve_takes_every_gpu_until_it_is_ended_and_gives_the_key_to_no_command_line(number, code, machine, capfd):
    def stop():
        started("server")
        until(lambda: "is ready" in capfd.readouterr().err)
        os.kill(os.getpid(), number)

    os.environ["VLLM_API_KEY"] = "secret"
    words = ["--host", "0.0.0.0", "--port", str(free_port()), "--", "--max-num-seqs", "64"]
    assert run(*words, command="serve", then=stop) == code
    (served,) = started("server")
    assert (served["CUDA_VISIBLE_DEVICES"], served["VLLM_API_KEY"]) == ("0,1", "secret")
    stated = [option(served["argv"], name) for name in ("--data-parallel-size", "--host", "--port")]
    assert stated == ["2", "0.0.0.0", words[3]]
    assert served["argv"][-2:] == words[-2:], "what follows the dashes"
    assert "secret" not in " ".join(served["argv"])


def test_serve_says_who_can_use_it_and_wants_a_key_for_other_machines(machine, capfd):
    says(dies=True)
    port = ["--port", str(free_port())]  # not 8000, which another run of these tests may be about to take
    assert run("--use_cpu", *port, command="serve", recipe={"vllm_tensor_parallel_size": 2}) == 2
    assert option(started("server")[0]["argv"], "--tensor-parallel-size") == "2"
    assert "every user of this machine can use this server and change its weights: set" in capfd.readouterr().err
    assert run("--host", "0.0.0.0", *port, command="serve") == 2
    assert "host='0.0.0.0' lets other machines use the server, which then needs a key: set" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "answer", "line"),
    [
        ({}, "adapter", "GPU 1 is in use by process 4711 "),
        ({"use_peft": "no"}, "weights", "GPU 1 is in use by process 4711 "),
        ({"vllm_mode": "colocate"}, "none", "this recipe has no server to start: "),
        ({"use_vllm": False}, "none", "this recipe has no server to start: "),
    ],
)
def test_serve_check_says_what_is_sent_to_the_server_and_starts_nothing(recipe, answer, line, machine, capsys):
    gpus(2, used="GPU-1aa, 4711, /bin/python\\n")
    assert run("--check", "--json", command="serve", recipe=recipe) == 0
    assert json.loads(capsys.readouterr().out) == {"server": answer}
    for words, refusal in (([], line), (["--json"], "--json would be ignored without --check: ")):
        assert run(*words, command="serve", recipe=recipe) == 2
        assert f"error: {refusal}" in capsys.readouterr().err


# The environment of a server


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The calls of commands that would be run, with a GPU or without. Those with "fails" in them fail."""
    asked = Mock(side_effect=lambda command, **_: subprocess.CompletedProcess(command, int("fails" in str(command))))
    monkeypatch.setattr("subprocess.run", asked)
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        (["--make_env"], None),
        (["--make_env", "folder"], None),
        (["--make_env", "recipe.yaml"], RECIPE),
        (["recipe.yaml", "--make_env"], RECIPE),
        (["--make_env", "recipe.yaml"], {**RECIPE, **FULL}),
    ],
)
def test_the_environment_of_a_server_has_a_vllm_that_serves_every_recipe(words, recipe, commands, capsys, tmp_path):
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    folder = tmp_path / ("folder" if "folder" in words else ".venv-vllm")
    folder.mkdir()
    for _ in range(2):
        assert main(["serve", *words]) == 0
        out, err = capsys.readouterr()
        assert out == f"{folder}/bin/vllm\n"
        assert ("trains in an environment with vLLM" in err) == (recipe == {**RECIPE, **FULL})
    # The second time the environment is there.
    venv, install = (call.args[0] for call in commands.call_args_list)
    assert venv[1:] == ("-m", "venv", str(folder))
    assert install[-3:] == ("install", f"vllm{vllm_env.TRL_SUPPORTED}", "vllm-bnb-plugin")
    assert f'"vllm{vllm_env.TRL_SUPPORTED}"' in (launching.ROOT / "pyproject.toml").read_text()


def test_an_environment_of_other_versions_is_made_again_and_what_fails_is_one_line(commands, capsys, monkeypatch):
    write_json(Path("fails/ready"), "other versions")
    assert main(["serve", "--make_env", "fails"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: the environment for vLLM was not made: -m venv")
    assert not Path("fails/ready").exists()


@pytest.mark.parametrize(
    ("machine", "libc", "refused"),
    [
        ("x86_64", ("glibc", "2.31"), ""),
        ("x86_64", ("glibc", "2.28"), "vLLM needs glibc 2.31 or newer, and this machine has glibc 2.28: "),
        ("aarch64", ("glibc", "2.31"), "vLLM needs glibc 2.34 or newer, and this machine has glibc 2.31: "),
        ("x86_64", ("", ""), "vLLM needs glibc 2.31 or newer, and this machine has Linux: "),
    ],
)
def test_a_system_that_is_too_old_for_vllm_is_refused_before_the_download(
    machine, libc, refused, commands, capsys, monkeypatch
):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("platform.libc_ver", lambda: libc)
    Path(".venv-vllm").mkdir()
    assert main(["serve", "--make_env"]) == (2 if refused else 0)
    assert (f"error: {refused}" if refused else "about 4 GB to download") in capsys.readouterr().err
    assert commands.called == (not refused)


# The demo, and training itself, without stand-ins


def test_a_demo_that_is_finished_is_kept_under_a_number(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("grpo_math.train.launcher.train", lambda words: len(words) - 4)
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "demo.1"):
        write_json(tmp_path / "runs" / name / "finished.json", name)
    assert main(["demo"]) == 0
    assert (tmp_path / "runs/demo.2/finished.json").read_text() == '"demo"\n'
    out, err = capsys.readouterr()
    assert err.startswith("The earlier run is kept in runs/demo.2.\nThis takes about 10 minutes")
    assert out.endswith(' grpo-math ask runs/demo "What is 21 + 23?"\n')
    assert main(["demo", "--output_dir", "other", "--seed", "1"]) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.full
def test_a_real_server_is_started_for_a_real_run_and_ended(tmp_path, smollm):
    if not os.environ.get("GRPO_MATH_VLLM"):
        pytest.skip("GRPO_MATH_VLLM names no vllm: tests/vllm_environment.sh makes one")
    recipe, run_dir = tmp_path / "recipe.yaml", tmp_path / "run"
    settings = {
        **RECIPE,
        "model_name_or_path": smollm,
        "dtype": "float32",  # a CPU without AVX-512 takes several times as long in bfloat16
        "vllm_max_model_length": 512,
        "max_steps": 2,
        "prompts_per_step": 0,
        "per_device_train_batch_size": 4,
        "lora_dropout": 0.0,
        "prompt_template": "as_is",
        "eval_n": 4,  # with LoRA, vLLM computes 2,000 tokens per minute on a slow CPU
        "save_strategy": "no",
        "output_dir": str(run_dir),
    }
    recipe.write_text(yaml.safe_dump(settings))
    launching.run(
        [sys.executable, "-m", "grpo_math.cli", "train", "--config", str(recipe), *launching.TINY],
        **CPU,
        TEST_FOLDER=str(tmp_path),
    )
    assert [line["step"] for line in history(run_dir)] == [1, 2]
    assert not alive(str(tmp_path))
