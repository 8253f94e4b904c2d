"""Which settings are secrets, by their names, and settings without them: a run directory gets shared.

Does not look at values: a token under another name, or inside a text, is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def _inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    return [_inside(part) for part in value] if isinstance(value, (list, tuple)) else value
