"""What a checkpoint's files would call: a member of DeepSpeed's enum, as Python 3.11.2 writes it, and nothing else."""

from __future__ import annotations

import os

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from grpo_math.train.pickles import STAGES, code_in


class Called:
    def __init__(self, function, *args) -> None:
        self.made = (function, args)

    def __reduce__(self):
        return self.made


@pytest.fixture
def found(tmp_path):
    def of(content) -> str | None:
        torch.save({"tensor": torch.ones(2), "content": content}, tmp_path / "x.pt")
        return code_in(tmp_path / "x.pt")

    return of


def test_a_member_of_the_enum_is_harmless_as_often_as_it_comes(found):
    assert found([Called(getattr, ZeroStageEnum, name) for name in (*STAGES, *STAGES)]) is None
    assert set(ZeroStageEnum.__members__) == set(STAGES)


@pytest.mark.parametrize("name", ["mro", "__class__", "__init__", "from_bytes"])
def test_anything_else_of_it_is_not(name, found):
    assert (
        found([Called(getattr, ZeroStageEnum, "weights"), Called(getattr, ZeroStageEnum, name)]) == "builtins.getattr"
    )


def test_a_getattr_that_is_handed_on_or_asks_another_is_not(found):
    weights = Called(getattr, ZeroStageEnum, "weights")
    assert found([weights, getattr]) == "builtins.getattr"
    assert found([weights, Called(getattr, torch.Tensor, "numpy")]) == "builtins.getattr"
    assert "builtins.getattr" in str(found([weights, Called(getattr, os.PathLike, "register")]))
    assert "posix.system" in str(found(Called(os.system, "true")))
