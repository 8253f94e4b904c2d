"""The largest micro-batch that a run can meet, as rows made up for a trial before the first step.

A run whose longest completions come at step 120 dies there, hours in, if memory is short by a little. The same rows at
the start, computed forward and backward and thrown away, say it at once (`MathGRPOTrainer._try_longest`).

Does not compute anything on them, and knows no memory: planner/ does.
"""

from __future__ import annotations

import torch

from grpo_math.trainer.rows import Rows


def longest_rows(prompt: list[int], lengths: list[int], group: int, eos: int, device: torch.device) -> Rows:
    """A row for each of ``lengths``, the longest first: the tokens of a completion. A prompt serves ``group`` of them.

    Prompts differ in their first token, so that packing does not take two groups for one. ``num_items_in_batch`` is the
    number of the completions' tokens.

    >>> rows = longest_rows([5, 6], [4, 4, 3], 2, eos=9, device=torch.device("cpu"))
    >>> rows["prompt_ids"].tolist(), rows["completion_mask"].sum(dim=1).tolist(), rows["num_items_in_batch"].item()
    ([[0, 6], [0, 6], [1, 6]], [4, 4, 3], 11)
    """
    number = torch.arange(len(lengths), device=device)
    prompts = torch.tensor(prompt, device=device).repeat(len(lengths), 1)
    prompts[:, 0] = number // group
    tokens = torch.tensor(lengths, device=device)
    mask = (torch.arange(lengths[0], device=device) < tokens[:, None]).long()
    zeros = torch.zeros(mask.shape, device=device)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": torch.full_like(mask, eos),
        "completion_mask": mask,
        "advantages": 1.0 - 2.0 * (number % 2),
        "num_items_in_batch": tokens.sum(),
        "old_per_token_logps": zeros,
        "ref_per_token_logps": zeros,
        "importance_sampling_ratio": zeros + 1.0,
    }
