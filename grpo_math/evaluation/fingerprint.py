"""Short hashes of what must be the same for two evaluations to be one, or to be compared.

Does not compare anything: journal.py and compare.py do. The grader has a number instead (`GRADER`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_math.problems.prompts import PROBLEM, TEMPLATES, build_prompt
from grpo_math.run.resume import short_hash

Row = Mapping[str, Any]
WEIGHTS = (".safetensors", ".bin", ".gguf")


def prompt_hash(rows: Sequence[Row], tokenizer: Any = None) -> str:
    """Return a hash of the prompt without its problem: the template, and the chat template that renders messages.

    >>> one, other, boxed = (
    ...     {"problem": problem, "answer_format": template}
    ...     for problem, template in (("What is 3 + 4?", "gsm8k"), ("What is 5 + 6?", "gsm8k"), ("5 + 6?", "boxed"))
    ... )
    >>> prompt_hash([one]) == prompt_hash([other]), prompt_hash([one]) == prompt_hash([boxed])
    (True, False)
    """
    template, problem, prompt = (rows[0].get(name) for name in ("answer_format", "problem", "prompt"))
    if template in TEMPLATES and prompt in (None, build_prompt(str(problem), template)):  # not the user's own prompt
        prompt = build_prompt(PROBLEM, template)
    chat = None if isinstance(prompt, str) else getattr(tokenizer, "chat_template", None)
    return short_hash([prompt, chat])


def problems_hash(rows: Sequence[Row]) -> str:
    """Return a hash of the problems and gold answers, in their order."""
    return short_hash([[row["id"], row["problem"], row["answer"]] for row in rows])


def weights_hash(*folders: str | None) -> str:
    """Return a hash of the names, sizes and modification times of the weights in each folder.

    An adapter that was trained again has another hash. A Hub id stands for itself: it is not looked up.
    """
    files = []
    for folder in folders:
        inside = sorted(Path(folder).iterdir()) if folder and Path(folder).is_dir() else []
        stats = [(path, path.stat()) for path in inside if path.suffix in WEIGHTS]
        files.append([[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in stats] or folder)
    return short_hash(files)
