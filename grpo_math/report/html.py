"""What the report's pages are made of: escaped text, sections, figures as they are read, files written whole.

Does not know what a run holds.
"""

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.report.viewer import visible
from grpo_math.run.redact import is_secret


def part(name: str) -> str:
    """A file of this folder: a template, a style sheet, a script."""
    return files("grpo_math.report").joinpath(name).read_text(encoding="utf-8")


def hash_of(script: str) -> str:
    """What a page's content security policy names its own script by."""
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def section(title: str, body: str, kind: str = "") -> str:
    """A part of the page under a heading; ``body`` is HTML."""
    return f'<section class="{kind}"><h2>{title}</h2>{body}</section>'


def flat(table: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested settings as dotted names. A page gets shared, so what looks like a credential is not on it."""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from flat(value, name + ".")
        elif isinstance(value, str) and is_secret(str(key)):
            yield name, "(not shown)"
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, default=str)


def escaped(value: object) -> str:
    return escape(visible(str(value)))


def percent(value: float) -> str:
    return f"{value:.1%}"


def points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "\N{MINUS SIGN}")


def write(path: Path, content: bytes) -> None:
    """Into a file of another name first: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError("run_dir", str(path.parent), reason, "make room for it") from None
