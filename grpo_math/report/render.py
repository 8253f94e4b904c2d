"""Templates of this folder and what a run holds -> the text of a page or a card, and files that are written whole.

Whatever a template prints is text: unseen characters get a name, and in a page all of it is escaped.

Does not know what a run holds.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from grpo_math.errors import ConfigError
from grpo_math.report.formulas import Formulas
from grpo_math.report.text import visible
from grpo_math.run.redact import is_secret


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("grpo_math.report", ""),
        autoescape=select_autoescape(["html"]),
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(percent=percent, points=points, cell=cell, row=row, fence=fence)
    return made


def render(template: str, /, **values: Any) -> str:
    """Return a template of this folder with these values."""
    return _environment().get_template(template).render(values)


def page(**values: Any) -> str:
    """Return page.html with these values. Its policy allows no script except page.js."""
    style, script = (files("grpo_math.report").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    own = {"style": Markup(style), "script": Markup(script), "script_hash": digest, "formulas": Formulas()}
    return render("page.html", **own, **values)


def percent(value: float) -> str:
    return f"{value:.1%}"


def points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "\N{MINUS SIGN}")


def cell(text: object) -> str:
    """Return a text for a cell of a table in Markdown."""
    return " ".join(str(text).split()).replace("|", "\\|")


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(cell, cells))} |"


def fence(text: str, language: str) -> str:
    """Return a block of code in Markdown. Its backticks outnumber any run of backticks in the text."""
    ticks = "`" * (1 + max([2, *(len(run) for run in re.findall("`+", text))]))
    return f"{ticks}{language}\n{text}\n{ticks}\n"


def write(path: Path, content: bytes) -> None:
    """Write a file under another name first: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError("run_dir", str(path.parent), f"cannot be written ({error.strerror})", "make room") from None


def flat(table: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings under dotted names. A page gets shared: what looks like a credential is not shown."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            yield f"{prefix}{key}", "(not shown)" if is_secret(str(key)) else value
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str)
