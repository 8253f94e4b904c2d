"""Short hashes of prompt, problems and weights, which must be equal to continue or to compare evaluations.

The grader has a number instead of a hash (`GRADER`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_math.problems.prompts import PROBLEM
from grpo_math.run.resume import short_hash

Row = Mapping[str, Any]
WEIGHTS = (".safetensors", ".bin", ".gguf")


def engine_name(backend: str) -> str:
    """Return the engine of a backend, which is the same if the user started the server.

    >>> engine_name("vllm-server"), engine_name("hf")
    ('vllm', 'hf')
    """
    return backend.removesuffix("-server")


def prompt_hash(rows: Sequence[Row], tokenizer: Any = None) -> str:
    """Return a hash of the prompt without its problem: the template, and the chat template that renders messages.

    >>> one, other, shouted = (
    ...     {"problem": problem, "prompt": f"{before} {problem}"}
    ...     for problem, before in (("3 + 4?", "What is"), ("5 + 6?", "What is"), ("5 + 6?", "WHAT IS"))
    ... )
    >>> prompt_hash([one]) == prompt_hash([other]), prompt_hash([one]) == prompt_hash([shouted])
    (True, False)
    """
    row = rows[0]
    problem, prompt = (json.dumps(row.get(name), ensure_ascii=False) for name in ("problem", "prompt"))
    # Without the quotes, because the problem is inside a longer string of the prompt.
    around = prompt.replace(problem[1:-1], PROBLEM)
    chat = None if isinstance(row.get("prompt"), str) else getattr(tokenizer, "chat_template", None)
    return short_hash([row.get("answer_format"), around, chat])


def problems_hash(rows: Sequence[Row]) -> str:
    """Return a hash of the problems and gold answers, in their order."""
    return short_hash([[row["id"], row["problem"], row["answer"]] for row in rows])


def weights_hash(*folders: str | None) -> str:
    """Return a hash of the names, sizes and modification times of the weights in each folder.

    An adapter that was trained again has another hash. For a Hub id the name is hashed, without a request to the Hub.
    """
    files = []
    for folder in folders:
        inside = sorted(Path(folder).iterdir()) if folder and Path(folder).is_dir() else []
        stats = [(path, path.stat()) for path in inside if path.suffix in WEIGHTS]
        files.append([[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in stats] or folder)
    return short_hash(files)
