"""Settings and texts without secrets, because a run directory gets shared. A setting is secret by its name.

Does not guess from values: a token under another name, and in no variable of the environment, is not found.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_math.reading import from_json

ENDINGS = ("token", "key", "secret", "password", "passwd", "credentials")
# Settings of a tokenizer, and of transformers, that only sound like secrets.
NO_SECRETS = ("eos_token", "pad_token", "bos_token", "unk_token", "image_token", "video_token")


def is_secret(name: str) -> bool:
    """Return True if a setting of this name holds a token, a key or a password.

    >>> [is_secret(name) for name in ("hub_token", "--api-key", "WANDB_API_KEY", "password")]
    [True, True, True, True]
    >>> [is_secret(name) for name in ("eos_token", "max_tokens", "monkey")]
    [False, False, False]
    """
    name = name.lower().strip("-").replace("-", "_")
    return name not in NO_SECRETS and name.rpartition("_")[2] in (*ENDINGS, "apikey")


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not secret, at every depth of mappings and lists.

    >>> without_secrets({"seed": 1, "model_init_kwargs": {"token": "hf_x", "dtype": "auto"}, "hub_token": "hf_x"})
    {'seed': 1, 'model_init_kwargs': {'dtype': 'auto'}}
    """
    return {name: _inside(value) for name, value in settings.items() if not is_secret(str(name))}


def hidden(word: str) -> str:
    """Return a word of a command line: a mapping in JSON without its secrets, any other word unchanged.

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
    """Return a foreign text as one line of at most 300 characters.

    These secrets are left out, and the query of a URL, which may be a signature.

    >>> one_line("PUT https://x.y/z?sig=1 failed\\nfor hf_x", {"hf_x"})
    'PUT https://x.y/z failed for ***'
    """
    line = " ".join(str(text).split())
    for secret in secrets:
        line = line.replace(secret, "***")
    # Cut last: half of a secret would not be found.
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", line)[:300]


def _inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    return [_inside(part) for part in value] if isinstance(value, (list, tuple)) else value
