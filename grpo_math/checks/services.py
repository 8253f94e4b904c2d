"""Checks of what a run talks to: the Hub and the model on it, trackers, a vLLM server.

Each question waits a few seconds at most. Keys are looked for, never printed or sent anywhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version

from grpo_math.checks.machine import supported
from grpo_math.checks.setup import Said, Setup
from grpo_math.errors import ConfigError, one_of
from grpo_math.planner.model import read_config

SECONDS = 5.0  # that an answer may take
# transformers' names of trackers, and the package of each
TRACKERS = {
    "azure_ml": "azureml",
    "comet_ml": "comet_ml",
    "mlflow": "mlflow",
    "neptune": "neptune",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
    "codecarbon": "codecarbon",
    "clearml": "clearml",
    "dagshub": "dagshub",
    "flyte": "flytekit",
    "dvclive": "dvclive",
    "swanlab": "swanlab",
    "kubeflow": "kubeflow",
}
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.safetensors.index.json")


def model(setup: Setup) -> Iterator[Said]:
    """The model is a folder with a config.json and weights, or is on the Hub or in its cache."""
    s = setup.settings
    name, revision = s["model_name_or_path"], s["model_revision"]
    if not name:
        raise ConfigError("model_name_or_path", name, "is missing", "give a folder, a Hub id, or 'embedded'")
    path = Path(name).expanduser()
    local = path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if (setup.embedded or local) and revision != "main":
        raise ConfigError("model_revision", revision, "would be ignored: the model is a local one", "leave it out")
    if setup.embedded:
        return
    if not local:
        yield from _on_the_hub(name, revision)
        return
    if not path.is_dir():
        raise ConfigError("model_name_or_path", name, "is no folder", "give a folder, a Hub id, or 'embedded'")
    config = read_config(name)
    if not config.get("model_type"):
        raise ConfigError("model_name_or_path", name, "has no model_type in its config.json", "check the file")
    if not any(next(path.glob(pattern), None) for pattern in WEIGHTS):
        raise ConfigError("model_name_or_path", name, "holds no weights (*.safetensors)", "give a model's folder")


def _on_the_hub(name: str, revision: str) -> Iterator[Said]:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    remedy = "give a folder, a Hub id, or 'embedded'"
    try:
        cached = isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision), str)
    except HFValidationError:
        raise ConfigError("model_name_or_path", name, "is no folder and no name of the Hub", remedy) from None
    if offline():
        if not cached:
            reason = "is no folder here and not in the Hub's cache, and HF_HUB_OFFLINE is set"
            raise ConfigError("model_name_or_path", name, reason, remedy)
        yield Said("info", "HF_HUB_OFFLINE is set: the model comes from the Hub's cache", "")
        return
    try:
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=SECONDS)
    except RevisionNotFoundError:
        raise ConfigError("model_revision", revision, f"is not there in {name}", "give one that is") from None
    except RepositoryNotFoundError:
        reason = "is not on the Hub, or needs a login"
        raise ConfigError("model_name_or_path", name, reason, f"{remedy}; hf auth login for a private one") from None
    except Exception as error:
        if cached:
            yield Said("warning", "the Hub cannot be reached, and the model is in its cache", "set HF_HUB_OFFLINE=1")
            return
        reason = f"is no folder here, and the Hub cannot be reached ({type(error).__name__})"
        raise ConfigError("model_name_or_path", name, reason, remedy) from None


def offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def hub(setup: Setup) -> Iterator[Said]:
    """A run that is to be pushed has a Hub that it can reach, and a token."""
    if not setup.settings["push_to_hub"]:
        return
    if offline():
        raise ConfigError("push_to_hub", True, "cannot work while HF_HUB_OFFLINE is set", "leave one of them out")
    import huggingface_hub

    if not (setup.settings["hub_token"] or huggingface_hub.get_token()):
        raise ConfigError("push_to_hub", True, "needs a token of the Hub, and there is none", "run hf auth login")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if not reachable(endpoint):
        yield Said("warning", f"{endpoint} cannot be reached", "push later: grpo-math push")


def trackers(setup: Setup) -> Iterator[Said]:
    """Every tracker of report_to is installed; wandb has a key and is reachable, or is offline, which is said."""
    said = setup.settings["report_to"]
    names = [name for name in (said if isinstance(said, list) else [said]) if name]
    for name in names:
        if name in ("none", "all"):
            continue
        one_of("report_to", name, (*TRACKERS, "all", "none"))
        package = TRACKERS[name]
        if not importlib.util.find_spec(package) and not (
            name == "tensorboard" and importlib.util.find_spec("tensorboardX")
        ):
            raise ConfigError("report_to", name, f"needs the package {package}", f"pip install {package}, or none")
        if name == "wandb":
            yield from _wandb()


def _wandb() -> Iterator[Said]:
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode in ("offline", "disabled", "dryrun"):
        yield Said("info", f"wandb is in {mode} mode: nothing is sent", "wandb sync uploads an offline run")
        return
    base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = urlsplit(base).hostname or base
    if not (os.environ.get("WANDB_API_KEY") or _in_netrc(host)):
        yield Said(
            "error", "report_to=wandb has no key, and would ask for one", "run wandb login, or WANDB_MODE=offline"
        )
    elif not reachable(base):
        yield Said("warning", f"{base} cannot be reached", "set WANDB_MODE=offline, and wandb sync after the run")


def _in_netrc(host: str) -> bool:
    import netrc

    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def reachable(url: str) -> bool:
    """Does something take a connection there within a few seconds? Through a proxy, the proxy is what answers."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    parts = urlsplit(proxy) if proxy and not urllib.request.proxy_bypass(parts.hostname or "") else parts
    try:
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
        socket.create_connection((parts.hostname or "", port), timeout=SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def vllm_server(setup: Setup) -> Iterator[Said]:
    """In server mode every vLLM server answers, in a version of the supported range."""
    s = setup.settings
    if not s["use_vllm"] or s["vllm_mode"] != "server":
        return
    urls = s["vllm_server_base_url"] or f"http://{s['vllm_server_host']}:{s['vllm_server_port']}"
    for url in urls.split(","):
        yield from _vllm_server(url.strip())


def _vllm_server(url: str) -> Iterator[Said]:
    if not reachable(url):
        yield Said("warning", f"no vLLM server answers at {url}", "start it before the run")
        return
    wanted = supported().get("vllm")
    found = _ask(f"{url}/version")
    if found is None and _ask(f"{url}/health") is None:
        yield Said("error", f"what answers at {url} is no vLLM server", "give vllm_server_base_url, or free the port")
    elif wanted and isinstance(found, dict):
        try:
            version = Version(str(found.get("version")))
        except InvalidVersion:
            return
        if not wanted.specifier.contains(version, prereleases=True):
            said = f"the server at {url} is vLLM {version}, not a version that this works with ({wanted.specifier})"
            yield Said("error", said, f'pip install "{wanted}" where it runs')


def _ask(url: str) -> Any:
    """The JSON of an answer, "" for an empty one, None for none."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=SECONDS) as answer:
            text = answer.read(10_000)
        return json.loads(text) if text.strip() else ""
    except (OSError, ValueError, urllib.error.HTTPError):
        return None


def ports(setup: Setup) -> Iterator[Said]:
    """The port that the processes of one machine meet at is free, while none of them has started."""
    if setup.processes < 2 or os.environ.get("RANK"):
        return
    port = int(os.environ.get("MASTER_PORT", 29500))
    if not is_free(port):
        yield Said("error", f"port {port} is taken", "accelerate launch --main_process_port 0")


def is_free(port: int) -> bool:
    """Nobody listens at this port of the machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
