r"""Files -> lines of text: unpacked, and in the encoding in which the file is.

>>> uncompressed("a.csv.xz"), windows_encoding("größer".encode("cp1252"))
('a.csv', 'cp1252')
"""

import bz2
import codecs
import gzip
import logging
import lzma
import os
import re
from contextlib import suppress
from functools import cache
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# The encodings of Excel and Windows, and the letters that make up at least this share of a text in them.
ENCODINGS = (("cp932", "[ぁ-んァ-ヶ]", 0.2), ("cp949", "[가-힣]", 0.9))
LETTERS = re.compile(r"[^\W\d_A-Za-z]")  # except for those of ASCII


def _open_zst(path: str | Path, mode: str) -> Any:
    from pyarrow import input_stream

    return BufferedReader(input_stream(str(path)))


# The ending of a compressed file -> the function that opens it.
OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}


def uncompressed(path: str | Path) -> str:
    """Return a file's name without the ending of its compression.

    >>> uncompressed("a.csv.xz"), uncompressed("a.csv")
    ('a.csv', 'a.csv')
    """
    stem, ending = os.path.splitext(path)
    return stem if ending in OPENERS else str(path)


def opened(path: str | Path) -> Any:
    """Open a file, compressed or not, as bytes."""
    return OPENERS.get(os.path.splitext(path)[1], open)(path, "rb")


def decoded(path: str | Path, file: Any) -> TextIOWrapper:
    """Return an open file as text.

    A byte that is not in the encoding becomes half a character, so that its row alone is refused.
    """
    return TextIOWrapper(file, _encoding(path), "surrogateescape", newline="")


def _encoding(path: str | Path) -> str:
    """Return the encoding of a text file: that of the first line that is not in ASCII."""
    with opened(path) as file:
        if file.peek(2).startswith(UTF_16):  # as Excel and PowerShell write text
            return "utf-16"
        ahead, line = next((pair for pair in enumerate(file) if not pair[1].isascii()), (0, b""))
        try:
            line.decode()
        except UnicodeDecodeError:
            content = line + file.read()
            if encoding := windows_encoding(content):
                _note(path, encoding)
                return encoding
            # A text in an encoding that is not known, and not some damaged lines.
            if 2 * sum(not part.isascii() for part in content.splitlines()) >= ahead:
                raise
    return "utf-8-sig"


def windows_encoding(content: bytes) -> str | None:
    """Return the encoding of a text that is not UTF-8; None for damaged UTF-8 and for other encodings.

    >>> texts = (("정답", "cp949"), ("答え", "cp932"), ("größer", "cp1252"))
    >>> [windows_encoding(text.encode(name)) for text, name in texts]
    ['cp949', 'cp932', 'cp1252']
    >>> texts = ("größer".encode() + b"\\xff", "Сколько".encode("cp1251"), "多少".encode("gbk"))
    >>> [windows_encoding(text) for text in texts]
    [None, None, None]
    """
    text = content.decode(errors="replace")
    if len(LETTERS.findall(text)) > text.count("\ufffd"):
        return None
    for encoding, usual, share in ENCODINGS:
        with suppress(UnicodeDecodeError):
            text = content.decode(encoding)
            if len(re.findall(usual, text)) >= share * len(LETTERS.findall(text)) > 0:
                return encoding
    with suppress(UnicodeDecodeError):
        text = content.decode("cp1252")
        # Letters with accents are next to plain ones. Three in a row are of another encoding.
        return None if re.search(r"[^\x00-\x7f]{3}", text) else "cp1252"
    return None


@cache
def _note(path: str | Path, encoding: str) -> None:
    logger.warning(f"{path} is not in UTF-8, and is read as {encoding}: if letters are wrong, save it in UTF-8")
