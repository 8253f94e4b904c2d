"""Settings and texts without secrets, because a run directory gets shared. A setting is secret by its name.

Does not guess from values: a token under another name, and in no variable of the environment, is not found.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

ENDINGS = ("token", "key", "secret", "password", "passwd", "credentials")
# Settings of a tokenizer, and of transformers, that only sound like secrets.
NO_SECRETS = ("eos_token", "pad_token", "bos_token", "unk_token", "image_token", "video_token")
HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Return True if a setting of this name contains a token, a key or a password.

    >>> [is_secret(name) for name in ("hub_token", "--api-key", "WANDB_API_KEY", "password")]
    [True, True, True, True]
    >>> [is_secret(name) for name in ("eos_token", "max_tokens", "monkey")]
    [False, False, False]
    """
    name = name.lower().strip("-").replace("-", "_")
    return name not in NO_SECRETS and name.rpartition("_")[2] in (*ENDINGS, "apikey")


def without_secrets(value: Any) -> Any:
    """Return a value without the settings that are secret, at every depth of mappings and lists.

    >>> without_secrets({"seed": 1, "model_init_kwargs": {"token": "hf_x", "dtype": "auto"}, "hub_token": "hf_x"})
    {'seed': 1, 'model_init_kwargs': {'dtype': 'auto'}}
    """
    if isinstance(value, Mapping):
        return {name: without_secrets(part) for name, part in value.items() if not is_secret(str(name))}
    if isinstance(value, list | tuple):
        return [without_secrets(part) for part in value]
    return value


def command_line(argv: Sequence[str]) -> str:
    """Return the command as it can be typed again, with the values of tokens and keys hidden.

    >>> command_line(["train.py", "--hub_token", "hf_x", "--seed=1", "--api-key=x"])
    'train.py --hub_token *** --seed=1 --api-key=***'
    >>> command_line(["train.py", "--model_init_kwargs", '{"token": "hf_x"}'])
    "train.py --model_init_kwargs '{}'"
    """
    words, hide = [], False
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            hide = is_secret(name)
            words.append(f"{name}={HIDDEN}" if hide and equals else shlex.quote(f"{name}{equals}{_in_json(value)}"))
        else:
            words.append(HIDDEN if hide else shlex.quote(_in_json(word)))
    return " ".join(words)


def _in_json(word: str) -> str:
    """Return a word of a command line: a mapping in JSON without its secrets, any other word unchanged.

    >>> _in_json('{"token": "hf_x", "dtype": "auto"}'), _in_json("0.1")
    ('{"dtype": "auto"}', '0.1')
    """
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return word
    return word if (clean := without_secrets(value)) == value else json.dumps(clean)


def known_secrets(*more: str | None) -> set[str]:
    """Return the values of the environment's variables with a secret's name, and these secrets, of 12 characters or
    more: a shorter value, such as a word, also occurs in texts that are not secret."""
    values = [*more, *(value for name, value in os.environ.items() if is_secret(name))]
    return {text for value in values if len(text := (value or "").strip()) >= 12}


def one_line(text: object, *secrets: str | None) -> str:
    """Return a foreign text as one line of at most 300 characters.

    These secrets are hidden, and the values of variables with a secret's name. The query of a URL is left out, because
    it may be a signature.

    >>> one_line("PUT https://x.y/z?sig=1 failed\\nfor hf_x", "hf_x")
    'PUT https://x.y/z failed for ***'
    """
    line = " ".join(str(text).split())
    # `str.replace` with an empty text would insert *** everywhere.
    for secret in filter(None, (*secrets, *known_secrets())):
        line = line.replace(secret, HIDDEN)
    # The line is cut last: half of a secret would not be found.
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", line)[:300]
