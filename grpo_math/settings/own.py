"""Our own settings together: the fields that `MathGRPOConfig` adds to TRL's, and the fields of the program."""

from dataclasses import dataclass

from grpo_math.settings import adapter, data, evaluation, loss, rewards, run, update, vllm

TOPICS = (data, rewards, loss, update, vllm, evaluation, adapter, run)


@dataclass
class TrainerFields(rewards.Grading, loss.Loss, update.Update, vllm.Vllm):
    """The fields that `MathGRPOConfig` adds to TRL's `GRPOConfig`."""


@dataclass
class ProgramFields(data.Data, rewards.Rewards, evaluation.Evaluation, run.Run):
    """The fields of a recipe that no class of TRL and no trainer has."""
