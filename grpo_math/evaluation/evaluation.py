"""`Evaluation`: a model on problems, with its results file and the journal that grows until the file is complete.

No other module reads or writes the keys of these files.

evaluator.py makes evaluations, paired.py compares two, and tables.py prints them.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, UserError
from grpo_math.evaluation.summary import Record, Summary, summarize
from grpo_math.problems.prompts import format_shown
from grpo_math.run.files import replace_text, write_json, writing
from grpo_math.system.reading import read_json, reading

FORMAT = 1  # of a results file


class ResultsError(UserError, ValueError):
    """Results files that cannot be read, or that cannot be compared with each other."""


@dataclass(frozen=True)
class Evaluation:
    """The graded completions of a model, several of each problem if ``samples`` says so.

    ``settings`` state who was asked what, and how: two evaluations with the same settings give the same completions.
    ``contamination`` is the result of `contamination.overlap`, and ``path`` the results file.
    """

    settings: Mapping[str, Any]
    summary: Summary
    records: Sequence[Record]
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    first_prompt: Any = None
    contamination: Mapping[str, Any] | None = None
    path: str | None = None

    @property
    def data(self) -> str | None:
        return self.settings.get("data")

    @property
    def samples(self) -> int:
        return self.settings["samples"]

    @property
    def temperature(self) -> float:
        return self.settings["temperature"]

    @property
    def requires_format(self) -> bool:
        """Return False if the prompt shows no answer format. An older file does not have the prompt."""
        return self.first_prompt is None or format_shown(self.first_prompt) is not None

    @property
    def problems_hash(self) -> str | None:
        return self.settings.get("problems_hash")

    @property
    def protocol(self) -> tuple[Any, ...]:
        """Return the problems and the way in which they are asked, without the model."""
        return (self.problems_hash, self.settings.get("prompt_hash"), self.samples, self.temperature)

    def to_dict(self, records: bool = True) -> dict[str, Any]:
        """Return the content of the results file, with the name of the file as ``results``, if there is one."""
        return {
            "format": FORMAT,
            **self.settings,
            **_summary_dict(self.summary, self.samples),
            **({} if self.contamination is None else {"contamination": self.contamination}),
            "seconds": self.seconds,
            "versions": self.versions,
            "prompt_of_first_row": self.first_prompt,
            **({"rows": [record.to_dict() for record in self.records]} if records else {}),
            **({} if self.path is None else {"results": self.path}),
        }


# The results file


def results_file(path: Path, settings: Mapping[str, Any]) -> Path:
    """Return the results file. In a folder its name has model, adapter, data, and a hash of all settings, so that
    other settings get another file."""
    if path.suffix == ".json":
        return path
    words = [settings["model"], settings["adapter"], settings.get("data")]
    digest = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    name = "-".join(Path(word).name.replace(":", "_") for word in words if word)
    return path / f"{name}-{digest}.json"


def write(evaluation: Evaluation, path: Path) -> None:
    write_json(path, replace(evaluation, path=None).to_dict())


def read(path: str | Path) -> Evaluation:
    """Return the evaluation in a file that `write` wrote. Raises `UserError`."""
    content = read_json(path)
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT or not content.get("rows"):
        raise ResultsError(f"{path}: is not a results file of format {FORMAT}: run the evaluation again")
    # A file that was changed by hand may lack anything.
    with reading(path):
        records, samples = [Record.from_dict(row) for row in content.pop("rows")], content["samples"]
        summary = summarize(records, samples)
        computed = _summary_dict(summary, samples)
        known = {
            "seconds": content.pop("seconds", 0.0),
            "versions": content.pop("versions", {}),
            "first_prompt": content.pop("prompt_of_first_row", None),
            "contamination": content.pop("contamination", None),
            "path": str(path),
        }
        # All keys that are left are settings.
        settings = {name: value for name, value in content.items() if name not in computed}
        evaluation = Evaluation(settings, summary, records, **known)
        _ = evaluation.temperature
    return evaluation


def _summary_dict(summary: Summary, samples: int) -> dict[str, Any]:
    accuracy, at_k = summary.accuracy, {"pass@k": summary.pass_at_k, "maj@k": summary.maj_at_k}
    return {
        "n": summary.n,
        "accuracy": accuracy.value,
        "ci95": accuracy.ci95,
        "accuracy_in_format": summary.accuracy_in_format,
        "mean@n": {"n": samples, "mean": accuracy.value, "ci95": accuracy.ci95},
        "categories": summary.categories,
        **{name: {str(k): share.value for k, share in by_k.items()} for name, by_k in at_k.items()},
        **{f"{name}_ci95": {str(k): share.ci95 for k, share in by_k.items()} for name, by_k in at_k.items()},
        **{
            f"by_{name}": {part: {"n": one.n, "accuracy": one.value, "ci95": one.ci95} for part, one in by_part.items()}
            for name, by_part in summary.parts.items()
        },
    }


# The journal


def journal_file(results: str | Path) -> Path:
    """Return the file that stores the answers during the evaluation, so that an interrupted evaluation continues.

    The first line states the settings, and each other line is the record of one completion.

    >>> journal_file("runs/base.json").as_posix()
    'runs/base.answers.jsonl'
    """
    return Path(results).with_suffix(".answers.jsonl")


def known_records(file: Path, settings: Mapping[str, Any]) -> list[Record]:
    """Return the records that an earlier call with these settings has stored: in the results file, or in the journal.

    Raises `UserError` for a file of something else.
    """
    journal = journal_file(file)
    if journal.exists() or not file.exists():
        return stored(journal, settings)
    try:
        evaluation = read(file)
    except UserError:
        raise ConfigError("output", str(file), "is not a results file", "give another --output") from None
    _check_same(file, evaluation.settings, settings)
    return list(evaluation.records)


def stored(path: Path, settings: Mapping[str, Any]) -> list[Record]:
    """Return the complete records, and remove a last line that was cut off. A new file gets its first line.

    Raises `Unreadable` if the file has no such first line, and `ConfigError` if its settings are other ones, so that
    results are never mixed.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"measured": dict(settings)}, ensure_ascii=False) + "\n")
        return []
    # Bytes, because a write may have ended within a character.
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    with reading(path):
        first, *rows = [json.loads(line) for line in complete.splitlines()]
        measured, records = {**first["measured"]}, [Record.from_dict(row) for row in rows]
    _check_same(path, measured, settings)
    # Only here: a file that is refused above stays as it was.
    os.truncate(path, len(complete))
    return records


def _check_same(path: Path, measured: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a file was measured with other settings."""
    expected = json.loads(json.dumps(settings))  # as a file has them
    for name in expected:
        if measured.get(name) != expected[name]:
            reason = f"was measured with {name}={measured.get(name)!r}, not {expected[name]!r}"
            raise ConfigError("output", str(path), reason, "give another --output, or change the setting back")


def store(path: Path, records: Iterable[Record]) -> None:
    """Add the records in one write, so that a killed process can cut only the last line."""
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record.to_dict(), ensure_ascii=False) + "\n" for record in records))
