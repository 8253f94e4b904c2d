"""Checks of what a run talks to: the Hub and the model on it, trackers, a vLLM server.

Each question waits a few seconds at most. Does not print a key; the Hub's goes to the Hub alone.
"""

import importlib.util
import json
import os
import re
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
from grpo_math.errors import ConfigError, UserError, one_of
from grpo_math.planner.model import is_folder, read_config
from grpo_math.reading import home, read_object
from grpo_math.run.ports import is_free
from grpo_math.run.redact import is_address

SECONDS = 5.0  # that an answer may take
# transformers' names of trackers, and the package of each
TRACKERS = {
    name: {"azure_ml": "azureml", "flyte": "flytekit"}.get(name, name)
    for name in (
        *("azure_ml", "comet_ml", "mlflow", "neptune", "tensorboard", "trackio", "wandb", "codecarbon", "clearml"),
        *("dagshub", "flyte", "dvclive", "swanlab", "kubeflow"),
    )
}
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.safetensors.index.json")
INDEX = "model.safetensors.index.json"
GIVE_A_MODEL = "give a folder, a Hub id, or 'embedded'"
WRITING = ("CausalLM", "LMHead", "ConditionalGeneration")  # in the names of classes that generate


def model(setup: Setup) -> Iterator[Said]:
    """The model is a folder with a config.json and weights, or is on the Hub or in its cache."""
    s = setup.settings
    name, revision = s["model_name_or_path"], s["model_revision"]
    if not name:
        raise ConfigError("model_name_or_path", name, "is missing", GIVE_A_MODEL)
    local = setup.embedded or is_folder(name)
    if local and revision != "main":
        raise ConfigError("model_revision", revision, "would be ignored: the model is a local one", "leave it out")
    weight = s["router_aux_loss_coef"]
    if local and weight and not re.search("expert|router", json.dumps(setup.model_config)):
        raise ConfigError("router_aux_loss_coef", weight, "has no experts in this model to balance", "leave it out")
    if local and not setup.embedded:
        _check_folder(name)
    elif not local:
        yield from _on_the_hub(name, revision)


def _check_folder(name: str) -> None:
    """A model's folder is whole: its config.json, the other JSON files, and the weights that an index names."""

    def refused(reason: str, remedy: str = "get the model's files again") -> ConfigError:
        return ConfigError("model_name_or_path", name, reason, remedy)

    path = home(name)
    if not path.is_dir():
        raise refused("is not a folder", GIVE_A_MODEL)
    config = read_config(name)
    if not config.get("model_type"):
        raise refused("has no model_type in its config.json", "check the file")
    if not any(next(path.glob(pattern), None) for pattern in WEIGHTS):
        raise refused("holds no weights (*.safetensors)", "give a model's folder")
    classes = " ".join(config.get("architectures") or WRITING)
    if not any(word in classes for word in WRITING):
        raise refused(f"is not a model that writes ({classes})", "give one whose config.json says ...ForCausalLM")
    for file in ("generation_config.json", "tokenizer_config.json", INDEX):
        if (path / file).exists() and read_object(path / file) is None:
            raise refused(f"has a {file} that is not a JSON object", "check the file")
    listed = (read_object(path / INDEX) or {}).get("weight_map")
    shards = sorted({str(file) for file in listed.values()}) if isinstance(listed, dict) else []
    if (path / INDEX).exists() and not shards:
        raise refused(f"has a {INDEX} that names no file")
    if lost := [shard for shard in shards if not (path / shard).is_file()]:
        raise refused(f"lacks {lost[0]}, which its {INDEX} names")
    if cut := [file.name for file in sorted(path.glob("*.safetensors")) if _cut(file)]:
        raise refused(f"has a file that was cut, or that does not hold weights: {cut[0]}")


def _cut(path: Path) -> bool:
    """Whether a file of weights is not as long as it says: a download that was cut, or a pointer of git-lfs."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, 100_000_000)))
            ends = [about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return True
    return path.stat().st_size < 8 + length + max(ends, default=0)


def _on_the_hub(name: str, revision: str) -> Iterator[Said]:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    def refused(reason: str, remedy: str = GIVE_A_MODEL) -> ConfigError:
        return ConfigError("model_name_or_path", name, reason, remedy)

    try:
        cached = isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision), str)
    except HFValidationError:
        raise refused("is neither a folder nor a name on the Hub") from None
    if offline():
        if not cached:
            raise refused("is neither a folder here nor in the Hub's cache, and HF_HUB_OFFLINE is set")
        yield Said("info", "HF_HUB_OFFLINE is set: the model comes from the Hub's cache", "")
        return
    try:
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=SECONDS)
    except RevisionNotFoundError:
        raise ConfigError("model_revision", revision, f"is not there in {name}", "give one that is") from None
    except RepositoryNotFoundError:
        remedy = f"{GIVE_A_MODEL}; hf auth login for a private one"
        raise refused("is not on the Hub, or needs a login", remedy) from None
    except Exception as error:
        if cached:
            yield Said("warning", "the Hub cannot be reached, and the model is in its cache", "set HF_HUB_OFFLINE=1")
            return
        raise refused(f"is not a folder here, and the Hub cannot be reached ({type(error).__name__})") from None


def offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def hub(setup: Setup) -> Iterator[Said]:
    """A run that is to be pushed has a name that the Hub takes, a Hub that it can reach, and a token that may write.

    transformers' own push at every save is off: a run is pushed once, when it is whole.
    """
    s = setup.settings
    off = "cannot work while HF_HUB_OFFLINE is set"
    if completions := s["log_completions_hub_repo"]:  # TRL makes this repository as soon as it has the weights
        check_repo_id("log_completions_hub_repo", completions)
        if offline():
            raise ConfigError("log_completions_hub_repo", completions, off, "leave one of them out")
        owners(s["hub_token"])
    if not s["push_to_hub"]:
        for name in ("hub_model_id", "hub_private_repo", "hub_revision", "hub_always_push"):
            if s[name]:
                raise ConfigError(name, s[name], "would be ignored without push_to_hub", "set push_to_hub: true too")
        return
    once = "a run is pushed once, at its end"
    if "hub_strategy" in setup.given and s["hub_strategy"] != "end":
        raise ConfigError("hub_strategy", s["hub_strategy"], f"is not done: {once}", "use end")
    if s["hub_always_push"]:
        raise ConfigError("hub_always_push", True, f"would be ignored: {once}", "leave it out")
    if offline():
        raise ConfigError("push_to_hub", True, off, "leave one of them out")
    wanted = s["hub_model_id"] or Path(str(s["output_dir"])).absolute().name
    check_repo_id("hub_model_id", wanted)
    try:
        known = owners(s["hub_token"])
    except UserError:
        raise
    except Exception as error:
        yield Said("warning", f"the Hub cannot be asked ({type(error).__name__})", "push later: grpo-math push")
        return
    owner = wanted.rpartition("/")[0]
    if owner and owner not in known:
        said = f"hub_model_id={wanted!r}: the token is of {known[0]}, and {owner} is none of its organisations"
        yield Said("warning", said, "see that it may write there")


def check_repo_id(field: str, name: str) -> None:
    """Raise `ConfigError` unless this may be the name of a model repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        remedy = "give user/name, of letters, digits, '-', '_' and '.', at most 96"
        raise ConfigError(field, name, "is not a name for a model repository", remedy) from None


def owners(token: str | None = None) -> list[str]:
    """Who a token of the Hub belongs to: the user, then the user's organisations.

    Raises `UserError` if there is no token, if the Hub does not take it, or if it may only read; other failures of the
    Hub or the network come as they are.
    """
    import huggingface_hub
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    if not (token or huggingface_hub.get_token()):
        raise UserError("the Hub wants a token, and there is none: run hf auth login, or set HF_TOKEN")
    endpoint = huggingface_hub.constants.ENDPOINT
    if not is_address(endpoint):
        raise ConfigError(
            "HF_ENDPOINT", "***", "is not an address", "give http://HOST:PORT, without a user or password"
        )
    headers = build_hf_headers(token=token or True)
    answer = huggingface_hub.get_session().get(f"{endpoint}/api/whoami-v2", headers=headers, timeout=SECONDS)
    if answer.status_code in (401, 403):
        remedy = "run hf auth login again, or set another HF_TOKEN"
        raise UserError(f"{endpoint} does not take this token ({answer.status_code}): {remedy}")
    hf_raise_for_status(answer)
    found = answer.json()
    if found.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"this token of {endpoint} may only read: make one that may write, under settings/tokens")
    return [found["name"], *(one["name"] for one in found.get("orgs", []))]


def trackers(setup: Setup) -> Iterator[Said]:
    """Every tracker of report_to is installed; where wandb has no key or no network, it is said to stay offline."""
    said = setup.settings["report_to"]
    for name in said if isinstance(said, list) else [said]:
        if name in (None, "", "none", "all"):
            continue
        one_of("report_to", name, (*TRACKERS, "all", "none"))
        package = TRACKERS[name]
        packages = ("tensorboard", "tensorboardX") if name == "tensorboard" else (package,)
        if not any(map(importlib.util.find_spec, packages)):
            raise ConfigError("report_to", name, f"needs the package {package}", f"pip install {package}, or none")
        if name == "wandb" and (why := wandb_offline()):
            yield Said("info", f"wandb stays offline: {why}", "wandb sync uploads the run later")


def wandb_offline() -> str:
    """Why a run's figures stay here until `wandb sync`; empty where they go to the server as they come.

    Left to itself wandb would ask for a key on the terminal, and wait for a server that does not answer.
    """
    if (mode := os.environ.get("WANDB_MODE", "").lower()) in ("offline", "disabled", "dryrun"):
        return f"WANDB_MODE={mode}"
    base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = urlsplit(base).hostname or base
    if not (os.environ.get("WANDB_API_KEY") or _in_netrc(host)):
        return "there is no key (wandb login, or WANDB_API_KEY)"
    return "" if reachable(base) else f"{base} cannot be reached"


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
    for url in filter(is_address, map(str.strip, urls.split(","))):  # trainer/refusals.py refuses the others
        yield from _vllm_server(url)


def _vllm_server(url: str) -> Iterator[Said]:
    if not reachable(url):
        yield Said("warning", f"no vLLM server answers at {url}", "start it before the run")
        return
    wanted = supported().get("vllm")
    found = _ask(f"{url}/version")
    if found is None and _ask(f"{url}/health") is None:
        yield Said(
            "error", f"what answers at {url} is not a vLLM server", "give vllm_server_base_url, or free the port"
        )
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
