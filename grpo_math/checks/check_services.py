"""Checks of the services that a run uses: the Hub, trackers, a vLLM server.

Each request waits a few seconds at most. Does not print a key, and sends the Hub's key to the Hub only.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError, Finding, UserError
from grpo_math.generation import vllm_env
from grpo_math.generation.vllm_server import Server
from grpo_math.problems.sources import hub_id
from grpo_math.system.addresses import is_address, server_url
from grpo_math.system.http import ServerError, reachable
from grpo_math.system.reading import is_folder

SECONDS = 5.0  # time limit of a request


def offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def cache_only(data: Iterable[str | None], model: str | None = None) -> str:
    """Let the Hub's client read only its cache in this process if one of these names is on the Hub and the Hub does not
    answer. Return a note about it, or "".

    The client would try each name six times, for half a minute.
    """
    from huggingface_hub import constants

    is_on_hub = any(map(hub_id, filter(None, data))) or not (model in (None, "embedded") or is_folder(str(model)))
    if constants.HF_HUB_OFFLINE or not is_on_hub or reachable(constants.ENDPOINT, SECONDS):
        return ""
    # Not in the environment, where it would be the user's own choice.
    constants.HF_HUB_OFFLINE = True
    return f"{constants.ENDPOINT} does not answer in {SECONDS:g} seconds: only files in the Hub's cache are read"


def hub(setup: Setup) -> Iterator[Finding]:
    """A run that is to be pushed has a name that the Hub takes, a Hub that it can reach, and a token that may write.

    transformers' own push at every save is off: a run is pushed once, when it is complete.
    """
    s = setup.settings
    if not s.push_to_hub:
        return
    setup.refuse("push_to_hub", offline(), "cannot work while HF_HUB_OFFLINE is set", "leave one of them out")
    # transformers names a repository without hub_model_id after the folder.
    name = s.hub_model_id or Path(str(s.output_dir)).absolute().name
    check_repo_id("hub_model_id", name)
    try:
        known = owners(s.hub_token)
    # The user can correct a missing token. A Hub that does not answer must not keep the run from training.
    except UserError:
        raise
    except Exception as error:
        yield Finding("warning", f"the Hub cannot be reached ({type(error).__name__})", "push later: grpo-math push")
        return
    owner = name.rpartition("/")[0]
    if owner and owner not in known:
        message = f"hub_model_id={name!r}: the token belongs to {known[0]}, who is not a member of {owner}"
        yield Finding("warning", message, "check that it may write there")


def check_repo_id(field: str, name: str) -> None:
    """Raise `ConfigError` unless this can be the name of a model repository."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        remedy = "give user/name, of letters, digits, '-', '_' and '.', at most 96"
        raise ConfigError(field, name, "is not a name for a model repository", remedy) from None


def owners(token: str | None = None) -> list[str]:
    """Return the owners of a Hub token: the user, then the user's organisations.

    Raises `UserError` if there is no token, if the Hub rejects the token, or if the token may only read. Other errors
    of the Hub or the network are not changed.
    """
    from huggingface_hub import constants, get_session, get_token, utils

    if not (token or get_token()):
        raise UserError("the Hub requires a token: run hf auth login, or set HF_TOKEN")
    endpoint = constants.ENDPOINT
    if not is_address(endpoint):
        raise ConfigError(
            "HF_ENDPOINT", endpoint, "is not an address", "give http://HOST:PORT, without a user or password"
        )
    # Not HfApi.whoami, which takes no timeout.
    answer = get_session().get(
        f"{endpoint}/api/whoami-v2", headers=utils.build_hf_headers(token=token or True), timeout=SECONDS
    )
    if answer.status_code in (401, 403):
        remedy = "run hf auth login again, or set another HF_TOKEN"
        raise UserError(f"{endpoint} does not take this token ({answer.status_code}): {remedy}")
    utils.hf_raise_for_status(answer)
    account = answer.json()
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"this token of {endpoint} may only read: make one that may write, under settings/tokens")
    return [account["name"], *(organisation["name"] for organisation in account.get("orgs", []))]


def trackers(setup: Setup) -> Iterator[Finding]:
    """wandb has a key and a network, or the finding is that it stays offline."""
    if "wandb" in (setup.settings.report_to or ()) and (why := wandb_offline()):
        yield Finding("info", f"wandb stays offline: {why}", "wandb sync uploads the run later")


def wandb_offline() -> str:
    """Return the reason why wandb has to run offline; "" if it can run online.

    Otherwise wandb would ask for a key on the terminal, and wait for a server that does not answer.
    """
    if (mode := os.environ.get("WANDB_MODE", "").lower()) in ("offline", "disabled", "dryrun"):
        return f"WANDB_MODE={mode}"
    base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = urlsplit(base).hostname or base
    if not (os.environ.get("WANDB_API_KEY") or _in_netrc(host)):
        return "there is no key (wandb login, or WANDB_API_KEY)"
    return "" if reachable(base, SECONDS) else f"{base} cannot be reached"


def _in_netrc(host: str) -> bool:
    # wandb reads the file in this variable, too.
    with suppress(OSError, NetrcParseError):
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


def vllm_server(setup: Setup) -> Iterator[Finding]:
    """The vLLM server of server mode answers, in a version of the supported range."""
    s = setup.settings
    if s.generation != "server":
        return
    url = s.vllm_server_base_url or server_url(s.vllm_server_host, s.vllm_server_port)
    server = Server(url, timeout=SECONDS, retries=0)
    try:
        server.check_version(vllm_env.supported(s))
    except ServerError as error:
        if error.status is None:
            yield Finding("warning", f"no vLLM server answers at {url}", "start it before the run")
        # TRL's own server has no /version.
        elif error.status != 404 or not server.healthy():
            yield Finding("error", str(error), "give vllm_server_base_url, or free the port")
