"""Our own settings together: the fields that `MathGRPOConfig` adds to TRL's, and the fields of the program."""

from dataclasses import dataclass

from grpo_math.settings import adapter, data, evaluation, loss, rewards, run, update, vllm

TOPICS = (data, rewards, loss, update, vllm, evaluation, adapter, run)


# A dataclass has the fields of its last base first.


@dataclass
class TrainerFields(vllm.Vllm, update.Update, loss.Loss, rewards.Grading):
    """The fields that `MathGRPOConfig` adds to TRL's `GRPOConfig`."""


@dataclass
class ProgramFields(run.Run, evaluation.Evaluation, adapter.Adapter, rewards.Rewards, data.Data):
    """The fields of a recipe that no class of TRL and no trainer has."""
