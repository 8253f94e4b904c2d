"""Which settings are secrets, by their names, and settings and texts without them: a run directory gets shared.

Does not guess from values: a token that stands under another name, and in no variable of the environment, is not seen.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from grpo_math.reading import from_json

ENDINGS = ("token", "key", "secret", "password", "passwd", "credentials")
# Settings of a tokenizer, and of transformers, that only sound like it.
NO_SECRETS = ("eos_token", "pad_token", "bos_token", "unk_token", "image_token", "video_token")


def is_secret(name: str) -> bool:
    """Does a setting of this name hold a token, key or password?

    >>> [is_secret(name) for name in ("hub_token", "--api-key", "WANDB_API_KEY", "password")]
    [True, True, True, True]
    >>> [is_secret(name) for name in ("eos_token", "max_tokens", "monkey")]
    [False, False, False]
    """
    name = name.lower().strip("-").replace("-", "_")
    last = name.rpartition("_")[2]
    return name not in NO_SECRETS and last in (*ENDINGS, "apikey")


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are no secrets, at every depth of mappings and lists.

    >>> without_secrets({"seed": 1, "model_init_kwargs": {"token": "hf_x", "dtype": "auto"}, "hub_token": "hf_x"})
    {'seed': 1, 'model_init_kwargs': {'dtype': 'auto'}}
    """
    return {name: _inside(value) for name, value in settings.items() if not is_secret(str(name))}


def secret_values(environment: Mapping[str, str]) -> set[str]:
    """What the variables with a secret's name hold, where it is long enough to be one; without white space around it.

    >>> secret_values({"HF_TOKEN": "hf_abcdefghijkl", "HOME": "/tmp", "SORT_KEY": "name"})
    {'hf_abcdefghijkl'}
    """
    return {value.strip() for name, value in environment.items() if is_secret(name) and len(value.strip()) >= 12}


def is_address(url: str) -> bool:
    """Is this http or https and a host? One with a user or password in it would be written down with them.

    >>> [is_address(url) for url in ("http://127.0.0.1:8000/v1", "http://ada:secret@host", "file:///x", "http://[::1")]
    [True, False, False, False]
    >>> is_address("http://host:99999"), is_address("http://no host")
    (False, False)
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # half of an IPv6 address, or no port
        return False
    if set(url) & set(" ,\t\n"):
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc


def hidden(word: str) -> str:
    """A word of a command line without the secrets of a mapping in JSON; any other word as it is.

    >>> hidden('{"token": "hf_x", "dtype": "auto"}'), hidden("0.1")
    ('{"dtype": "auto"}', '0.1')
    """
    try:
        value = from_json(word)
    except ValueError:
        return word
    if not isinstance(value, dict) or (clean := without_secrets(value)) == value:
        return word
    return json.dumps(clean)


def one_line(text: object, secrets: Iterable[str] = ()) -> str:
    """A foreign text as one line of at most 300 characters, without these secrets and without the query of a URL,
    which may be a signature.

    >>> one_line("PUT https://x.y/z?sig=1 failed\\nfor hf_x", {"hf_x"})
    'PUT https://x.y/z failed for ***'
    """
    line = " ".join(str(text).split())
    for secret in secrets:
        line = line.replace(secret, "***")
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", line)[:300]


def _inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    return [_inside(part) for part in value] if isinstance(value, (list, tuple)) else value
