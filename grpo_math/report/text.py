r"""Text written by a model, as text: a character that cannot be seen, or that turns the text around it, gets a name.

>>> print(visible("1\u202e2\x1b[31m\n3"))
1⟨U+202E⟩2␛[31m
3

Does not read files, and does not escape: render.py does.
"""

import re

# Control characters except tab and line feed; zero-width and direction marks; lone surrogates; tags.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
MOST_TEXT = 100_000  # characters of one text on the page: a browser needs minutes to lay out a longer line


def visible(text: str) -> str:
    r"""Return the text with a picture or a number for each unseen character. A line ends with ``\n`` alone."""

    def name(found: re.Match[str]) -> str:
        number = ord(found[0])
        return chr(0x2400 + number) if number < 0x20 else f"⟨U+{number:04X}⟩"

    return UNSEEN.sub(name, text.replace("\r\n", "\n"))


def shown(text: str) -> str:
    """Return the visible text for the page. A very long text is cut.

    >>> shown("x" * 100_001)[-37:]
    'x\\n(1 characters more are in the file)'
    """
    more = len(text) - MOST_TEXT
    return visible(text[:MOST_TEXT])[:MOST_TEXT] + (f"\n({more:,} characters more are in the file)" if more > 0 else "")


def text_of(value: object) -> str:
    """Return a prompt or completion as text. TRL logs a string, or messages whose content may come in parts."""
    if isinstance(value, list):
        return "\n".join(text_of(part) for part in value)
    if isinstance(value, dict):
        return text_of(value.get("content") if value.get("content") is not None else value.get("text"))
    return "" if value is None else str(value)


def prompt_of(value: object) -> tuple[str, str]:
    """Return the last user message of a prompt, and the whole prompt if it is a conversation."""
    if not isinstance(value, list):
        return text_of(value), ""
    users = [message for message in value if message.get("role") == "user"]
    return text_of(users[-1] if users else value), "\n\n".join(f"{m.get('role')}: {text_of(m)}" for m in value)
