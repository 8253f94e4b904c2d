"""Fill in the templates of this folder.

A template prints every value as text: control characters as their codes, and in a page all text is escaped.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from grpo_math.errors import escaped
from grpo_math.redact import is_secret


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("grpo_math.report", ""),
        # card.md is Markdown: HTML escapes would appear as they are in its code and its YAML.
        autoescape=select_autoescape(["html"]),
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(percent="{:.1%}".format, points=points, short=short, row=row)
    return made


def _printed(value: Any) -> Any:
    """Return a value as a template prints it. Only this package writes markup."""
    return escaped(value, keep="\r\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def render(template: str, /, **values: Any) -> str:
    """Return a template of this folder with these values."""
    return _environment().get_template(template).render(values)


def page(**values: Any) -> str:
    """Return page.html with these values. The page's policy allows no script except page.js."""
    style, script = (files("grpo_math.report").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    # A browser hashes the script as it is in the page. Markup keeps Jinja from escaping a character of it.
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return render("page.html", style=Markup(style), script=Markup(script), script_hash=digest, **values)


def points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "\N{MINUS SIGN}")


def short(value: object) -> str:
    """Return a value of a table in at most 80 characters. pandas makes a missing number a NaN.

    >>> short(0.123456), short(float("nan")), short(True), short(None)
    ('0.123', 'none', 'yes', 'none')
    """
    if value is None or value != value:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def row(cells: Iterable[object]) -> str:
    """Return a row of a table in Markdown."""
    texts = (" ".join(str(text).split()).replace("|", "\\|") for text in cells)
    return f"| {' | '.join(texts)} |"


def flat(table: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings under dotted names. A page may be shared, so the values of credentials are left out."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            # transformers reads 20 steps as 20.0, because a value below 1 is a share.
            number = int(value) if isinstance(value, float) and value.is_integer() else value
            text = value if isinstance(value, str) else json.dumps(number, default=str)
            yield f"{prefix}{key}", "(not shown)" if is_secret(str(key)) else text
