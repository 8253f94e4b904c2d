"""The machine of a run, a user's functions in it, and calls that the main process makes for all."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, distributed_c10d

from grpo_math.errors import ConfigError, UserError
from grpo_math.run import machine, main_process
from grpo_math.run.main_process import on_main
from grpo_math.run.user_functions import tried

MINE = """
import sys
halve = lambda values, more: values / 2
number = lambda values, more: 1.0
flat = lambda values, more: values[0]
fails = lambda values, more: {}["x"]
leaves = lambda values, more: sys.exit(3)
def function(): ...
def _hidden(): ...
"""


def test_a_port_is_free_unless_somebody_listens_there():
    with machine.socket.create_server(("", 0)) as taken:
        assert not machine.port_is_free(taken.getsockname()[1])
    port = machine.free_port()
    assert port > 0
    assert machine.port_is_free(port)


def test_the_gpus_of_a_machine_are_written_down(monkeypatch):
    cpu = machine.hardware()
    assert set(cpu) == {"cpus", "memory_gb"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card = [SimpleNamespace(name="A100", total_memory=40 * 2**30)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", card.__getitem__)
    assert machine.hardware() == {**cpu, "gpu": "A100", "gpus": 2, "gpu_memory_gb": 40.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:number", "returned a float: return a tensor of shape (2, 3), as it was given"),
        ("mine:flat", "returned a tensor of shape (3,): return a tensor of shape (2, 3), as it was given"),
        ("mine:fails", "raised KeyError: 'x' on a small example: it is called with 2 tensors of shape (2, 3)"),
        ("mine:leaves", "raised SystemExit: 3 on a small example: it is called with 2 tensors of shape (2, 3)"),
        (
            "mine:sys",
            "names no function of mine: use one of its functions: halve, number, flat, fails, leaves, function",
        ),
        (
            "exits:f",
            "names a module that cannot be imported (SystemExit: 0): write module:function, module as in an import",
        ),
    ],
)
def test_a_function_of_the_user_is_tried_and_what_is_wrong_is_one_line(name, message, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in machine.sys.path if path])
    for module in ("mine", "exits"):
        monkeypatch.delitem(machine.sys.modules, module, raising=False)
    sample = torch.ones(2, 3)
    assert torch.equal(tried("surrogate", "mine:halve", sample, sample, sample), sample / 2)
    with pytest.raises(ConfigError) as error:
        tried("surrogate", name, sample, sample, sample)
    assert str(error.value) == f"surrogate={name!r} {message}"
    assert machine.sys.path[-1] == str(tmp_path), "last, so that it hides no package"


@pytest.mark.parametrize("error", [UserError("this cannot be"), KeyError("x")])
def test_one_process_gets_its_own_result_and_its_own_error(error):
    assert on_main(lambda: [1]) == [1]
    with pytest.raises(type(error)) as raised:
        on_main(lambda: (_ for _ in ()).throw(error))
    assert raised.value is error


def test_the_others_wait_until_the_main_process_is_done(monkeypatch):
    store = HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    main, other = (SimpleNamespace(is_main_process=is_main) for is_main in (True, False))
    waiting = threading.Thread(target=main_process._wait_for_main, args=(other, "done"), daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    main_process._wait_for_main(main, "done")
    waiting.join(5)
    assert not waiting.is_alive()
