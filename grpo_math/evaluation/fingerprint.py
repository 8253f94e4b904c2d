"""Short hashes of what must be the same for two evaluations to be one, or to be compared.

Does not compare anything: journal.py and compare.py do. The grader has a version instead (grading/version.py).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_math.problems.prompts import TEMPLATES, build_prompt
from grpo_math.run.resume import short_hash

Row = Mapping[str, Any]
WEIGHTS = (".safetensors", ".bin", ".gguf")


def prompt_hash(rows: Sequence[Row], tokenizer: Any = None) -> str:
    """Of the prompt around a problem: the template's text, and the chat template's that turns messages into one.

    >>> one, other, boxed = (
    ...     {"problem": problem, "answer_format": template}
    ...     for problem, template in (("What is 3 + 4?", "gsm8k"), ("What is 5 + 6?", "gsm8k"), ("5 + 6?", "boxed"))
    ... )
    >>> prompt_hash([one]) == prompt_hash([other]), prompt_hash([one]) == prompt_hash([boxed])
    (True, False)
    """
    template = rows[0].get("answer_format")
    prompt = build_prompt("{problem}", template) if template in TEMPLATES else rows[0]["prompt"]
    chat = None if isinstance(prompt, str) else getattr(tokenizer, "chat_template", None)
    return short_hash([prompt, chat])


def problems_hash(rows: Sequence[Row]) -> str:
    """Of the problems and golds, in their order."""
    return short_hash([[row["id"], row["problem"], row["answer"]] for row in rows])


def weights_hash(*folders: str | None) -> str:
    """Of names, sizes and times of change of the weights in each folder; a name that is no folder stands for itself.

    So an adapter that was trained again is another one. What a Hub id resolves to is not looked up.
    """
    files = []
    for folder in folders:
        inside = sorted(Path(folder).iterdir()) if folder and Path(folder).is_dir() else []
        stats = [(path, path.stat()) for path in inside if path.suffix in WEIGHTS]
        files.append([[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in stats] or folder)
    return short_hash(files)
