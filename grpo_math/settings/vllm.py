"""The vLLM of a recipe: which process runs it, and what training sends to it."""

from collections.abc import Mapping
from typing import Any

from grpo_math.settings.fields import defaults
from grpo_math.system.addresses import is_this_machine, is_url


def generates(recipe: Mapping[str, Any]) -> str:
    """Return what generates the completions: transformers, or vLLM in ``vllm_mode`` colocate or server.

    >>> generates({}), generates({"use_vllm": True, "vllm_mode": "server"})
    ('transformers', 'server')
    """
    settings = {**defaults(), **recipe}
    return str(settings["vllm_mode"]) if settings["use_vllm"] else "transformers"


def starts_server(recipe: Mapping[str, Any]) -> bool:
    """Return True if a run of the recipe has to start a vLLM server on this machine.

    >>> served = {"use_vllm": True, "vllm_mode": "server"}
    >>> starts_server(served), starts_server({**served, "vllm_server_host": "node1"}), starts_server({"use_vllm": True})
    (True, False, False)
    """
    return generates(recipe) == "server" and not external_server(recipe)


def external_server(recipe: Mapping[str, Any]) -> str:
    """Return the address of an external server in the recipe, or "" if the run has to start a server.

    >>> external_server({"vllm_server_base_url": "http://node1:80"}), external_server({"vllm_server_host": "localhost"})
    ('http://node1:80', '')
    """
    # TRL's default host, 0.0.0.0, means a server on this machine.
    host = recipe.get("vllm_server_host") or "0.0.0.0"
    return recipe.get("vllm_server_base_url") or ("" if is_this_machine(host) else host)


def teacher_url(settings: Mapping[str, Any]) -> str:
    """Return the address of the server that ``reference_model`` names, or "" if it names a model.

    >>> teacher_url({"reference_model": "http://node1:8001"}), teacher_url({"reference_model": "Qwen/Qwen2.5-7B"})
    ('http://node1:8001', '')
    """
    name = str(settings["reference_model"] or "")
    return name if is_url(name) else ""


def sends_adapter(recipe: Mapping[str, Any]) -> bool:
    """Return True if only the adapter is sent to the server. Otherwise TRL sends all weights over NCCL."""
    settings = {**defaults(), **recipe}
    return settings["use_peft"] and settings["vllm_sync"] == "adapter"
