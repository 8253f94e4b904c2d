"""Short hashes of prompt, problems and weights, which must be equal to continue or to compare evaluations.

The grader has a number instead of a hash (`GRADER`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_math.problems.prompts import PROBLEM
from grpo_math.rewards.inputs import row_format
from grpo_math.run.resume import short_hash

Row = Mapping[str, Any]
WEIGHTS = (".safetensors", ".bin", ".gguf")
# The files that change the answers of the same weights: the scale of an adapter, the rope of a base, the end tokens.
CONFIGS = ("adapter_config.json", "config.json", "generation_config.json")


def prompt_hash(rows: Sequence[Row], tokenizer: Any = None) -> str:
    """Return a hash of the prompts without their problems: the templates, and the chat template of messages.

    Rows of one template have the hash of any of them.

    >>> one, other, shouted = (
    ...     {"problem": problem, "prompt": f"{before} {problem}"}
    ...     for problem, before in (("3 + 4?", "What is"), ("5 + 6?", "What is"), ("5 + 6?", "WHAT IS"))
    ... )
    >>> prompt_hash([one]) == prompt_hash([other]), prompt_hash([one]) == prompt_hash([shouted])
    (True, False)
    """
    templates = set()
    for row in rows:
        problem, prompt = (json.dumps(row.get(name), ensure_ascii=False) for name in ("problem", "prompt"))
        # Without the quotes, because the problem is inside a longer string of the prompt.
        templates.add((row_format(row), prompt.replace(problem[1:-1], PROBLEM)))
    is_chat = any(not isinstance(row.get("prompt"), str) for row in rows)
    chat = getattr(tokenizer, "chat_template", None) if is_chat else None
    return short_hash([*(part for template in sorted(templates, key=str) for part in template), chat])


def problems_hash(rows: Sequence[Row]) -> str:
    """Return a hash of the problems and gold answers, in their order."""
    return short_hash([[row["id"], row["problem"], row["answer"]] for row in rows])


def weights_hash(*folders: str | None) -> str:
    """Return a hash of the names, sizes and modification times of the weights in each folder, and one of the contents
    of their `CONFIGS`.

    An adapter that was trained again has another hash. For a Hub id the name is hashed, without a request to the Hub.
    """
    files, configs = [], []
    for folder in folders:
        inside = sorted(Path(folder).iterdir()) if folder and Path(folder).is_dir() else []
        stats = [(path, path.stat()) for path in inside if path.suffix in WEIGHTS]
        files.append([[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in stats] or folder)
        configs += [[path.name, path.read_text("utf-8", "replace")] for path in inside if path.name in CONFIGS]
    return short_hash(files) + (short_hash(configs) if configs else "")
