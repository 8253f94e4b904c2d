"""Checks of the model, in its folder or on the Hub, and of its adapter.

Does not load weights or a tokenizer. A request to the Hub waits a few seconds at most.
"""

import json
import os
import re
from collections.abc import Iterator

from grpo_math.checks.services import SECONDS, offline
from grpo_math.checks.setup import CheckResult, Setup
from grpo_math.errors import ConfigError, UserError, one_of
from grpo_math.generation.models import model_path
from grpo_math.planner.model import Shape, check_targets
from grpo_math.reading import home, is_folder
from grpo_math.settings.rules import LEAVE

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.safetensors.index.json")
GIVE_A_MODEL = "give a folder, a Hub id, or 'embedded'"
WRITING = ("CausalLM", "LMHead", "ConditionalGeneration")  # in the names of classes that generate


def model(setup: Setup) -> Iterator[CheckResult]:
    """The model is a folder with a config.json and weights, or is on the Hub or in its cache."""
    s = setup.settings
    name = model_path(s["model_name_or_path"])
    local = is_folder(name)
    setup.refuse("model_revision", local and s["model_revision"] != "main", "has no effect: the model is local", LEAVE)
    if local and s["router_aux_loss_coef"]:
        experts = re.search("expert|router", json.dumps(setup.model_config))
        setup.refuse("router_aux_loss_coef", not experts, "has no experts in this model to balance", LEAVE)
    if local:
        _check_folder(setup, name)
    else:
        _check_hub(name, s["model_revision"])
    yield from ()


def _check_folder(setup: Setup, name: str) -> None:
    """Check that the folder has weights, and the config.json of a model that generates text."""
    field, path = "model_name_or_path", home(name)
    setup.refuse(field, not path.is_dir(), "is not a folder", GIVE_A_MODEL)
    config = setup.model_config
    setup.refuse(field, not config.get("model_type"), "has no model_type in its config.json", "check the file")
    weights = any(next(path.glob(pattern), None) for pattern in WEIGHTS)
    setup.refuse(field, not weights, "has no weights (*.safetensors)", "give a model's folder")
    classes = " ".join(config.get("architectures") or WRITING)
    writes = any(word in classes for word in WRITING)
    remedy = "give one whose config.json says ...ForCausalLM"
    setup.refuse(field, not writes, f"is not a text-generation model ({classes})", remedy)


def _check_hub(name: str, revision: str) -> None:
    """Check that the Hub, or its cache, has the model's config.json."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    field, value, remedy = "model_name_or_path", name, GIVE_A_MODEL
    try:
        hf_hub_download(name, "config.json", revision=revision, etag_timeout=SECONDS)
        return
    except RevisionNotFoundError:
        field, value, reason, remedy = "model_revision", revision, f"is not there in {name}", "give one that is"
    except RepositoryNotFoundError:
        reason, remedy = "is not on the Hub, or needs a login", f"{GIVE_A_MODEL}; hf auth login for a private one"
    except HFValidationError:
        reason = "is neither a folder nor a name on the Hub"
    except Exception as error:  # the Hub's client raises a dozen kinds for a broken network
        why = "HF_HUB_OFFLINE is set" if offline() else f"the Hub cannot be reached ({type(error).__name__})"
        reason = f"is neither a folder here nor in the Hub's cache, and {why}"
    raise ConfigError(field, value, reason, remedy) from None


def adapter(setup: Setup) -> Iterator[CheckResult]:
    """The adapter's modules exist, and it is no larger than the model's maps."""
    s = setup.settings
    if not s["use_peft"]:
        return
    modules = s["lora_target_modules"]
    if modules and len(modules) == 1:
        try:
            re.compile(modules[0])
        except re.error as error:
            reason = f"is not a regular expression ({error})"
            raise ConfigError("lora_target_modules", modules[0], reason, "use all-linear") from None
    try:
        shape = setup.shape
    except UserError as error:
        yield CheckResult(
            "info", f"whether the adapter's modules exist is not checked: {error}", "see the model's layers"
        )
        return
    _check_modules(setup, shape)
    check_targets(shape, s)


def _check_modules(setup: Setup, shape: Shape) -> None:
    """Check that the adapter's modules and parameters belong to a layer, and that each is named once."""
    s, linears = setup.settings, [linear.name for linear in shape.linears]
    largest = max(max(linear.n_in, linear.n_out) for linear in shape.linears)
    modules = s["lora_target_modules"] or []
    small = f"is more than the {largest} of the model's largest map, and would add nothing"
    setup.refuse("lora_r", s["lora_r"] > largest, small, "use 8 to 64")
    one_name = "is one name, which TRL takes as an expression for a module's whole path"
    alone = len(modules) == 1 and modules[0] in linears
    setup.refuse("lora_target_modules", alone, one_name, f'write ".*{"".join(modules)}"')
    targeted = set(linears) if modules == ["all-linear"] else set(modules)
    for name in s["lora_target_parameters"] or []:
        remedy = f"name one such as {linears[0]}.weight"
        if not set(name.split(".")) & set(linears):
            raise ConfigError("lora_target_parameters", name, "matches no parameter of a layer", remedy)
        if set(name.split(".")) & targeted:
            reason = "is of a map that lora_target_modules has too"
            raise ConfigError("lora_target_parameters", name, reason, "leave it out of one of them")
    for name in s["lora_modules_to_save"] or []:
        one_of("lora_modules_to_save", name, ("embed_tokens", "lm_head", "norm", *linears))
