"""Messages over a pipe: a length, then JSON. Nothing is pickled, so nothing that arrives can run.

Does not read or write: pool.py and worker.py hold the two ends.
"""

import json
import struct
from typing import Any

HEADER = struct.Struct(">I")


def encode(message: dict[str, Any]) -> bytes:
    """A length-prefixed JSON frame, pure ASCII so that lone surrogates travel too.

    >>> encode({"a": 1})
    b'\\x00\\x00\\x00\\x08{"a": 1}'
    """
    body = json.dumps(message).encode("ascii")
    return HEADER.pack(len(body)) + body


def decode(buffer: bytearray) -> dict[str, Any] | None:
    """Take one whole frame from the front of the buffer, or None while it is incomplete.

    >>> decode(bytearray(encode({"a": 1}))), decode(bytearray(b"\\x00\\x00"))
    ({'a': 1}, None)
    """
    if len(buffer) < HEADER.size:
        return None
    (length,) = HEADER.unpack_from(buffer)
    if len(buffer) < HEADER.size + length:
        return None
    body = bytes(buffer[HEADER.size : HEADER.size + length])
    del buffer[: HEADER.size + length]
    return json.loads(body)
