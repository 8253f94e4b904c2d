"""Push a finished run to a repository on the Hub: weights in safetensors, tokenizer, model card, results, report.

`contents` names every file that is uploaded: no optimizer, no checkpoint, no pickle. `push` can be repeated: the Hub
knows contents by their hash, so an interrupted push continues with what the repository lacks.

The only module that writes to the network. Deletes nothing on the Hub.
"""

import json
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.utils import filter_repo_objects
from huggingface_hub.utils._http import default_client_factory

from grpo_math.checks.check_services import check_repo_id, offline, owners
from grpo_math.errors import ConfigError, PushError, UserError
from grpo_math.redact import known_secrets, one_line
from grpo_math.report import report
from grpo_math.report.card import model_card, result_files, trained_base
from grpo_math.report.run_dir import read_run
from grpo_math.run.checkpoints import FINISHED, named
from grpo_math.run.weights import weights_in
from grpo_math.system.reading import near, read_json

SECONDS = 120.0  # time without a byte from the Hub after which the push fails
# transformers and training leave other files next to the weights: pickles, checksums, their own card.
MODEL_FILES = [
    *("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model"),
]
# A loader would read these together with the pushed files, or instead of them.
LOADED = ["adapter_config.json", "adapter_model.*", "model*.safetensors", "*.safetensors.index.json", "pytorch_model*"]


def push(
    run_dir: str | Path,
    repo_id: str | None = None,
    *,
    private: bool | None = None,
    base_model: str | None = None,
    revision: str | None = None,
    checkpoint: str | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Push a run to ``repo_id`` (default: the run directory's name, under the token's user). Return {"url", "files"}.

    ``dry_run`` returns {"repo_id", "files"}, the files with their bytes, and uses no network.

    ``private`` True makes a private repository, and refuses a public one that exists; None leaves the choice to the
    Hub's own setting. ``base_model`` is the base's name on the Hub, if the run was trained from a folder.
    ``revision``: a branch, made if it does not exist. ``checkpoint``: best, or the name of a checkpoint's folder; by
    default the last weights.

    Raises `UserError` if the user can correct the cause (a run that has not ended, a name, a token, a repository with
    other weights), and `PushError`, which is a `UserError` too, if the Hub or the network failed.

    >>> push("runs/nowhere", "ada/sums")
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: run_dir='runs/nowhere' is not a run that has finished: give the run directory ...
    """
    run_dir = Path(run_dir)
    name = repo_id or run_dir.resolve().name
    check_repo_id("repo_id", name)
    # Until a run has finished, its weights may be those of an earlier, shorter run.
    if not (run_dir / FINISHED).exists():
        remedy = "give the run directory of a training; if it was stopped, start it again to resume it"
        raise ConfigError("run_dir", str(run_dir), "is not a run that has finished", near(run_dir) or remedy)
    if dry_run:
        files = contents(run_dir, name, checkpoint, base_model)
        _refuse_secrets(files)
        sizes = {file: len(c) if isinstance(c, bytes) else c.stat().st_size for file, c in sorted(files.items())}
        return {"repo_id": name, "files": sizes}
    if offline():
        raise ConfigError("repo_id", name, "cannot be pushed to while HF_HUB_OFFLINE is set", "unset it")
    _set_time_limit()
    api = huggingface_hub.HfApi()
    try:
        # A token that cannot write is reported here, before a repository exists.
        owner = owners()[0]
        name = name if "/" in name else f"{owner}/{name}"
        files = contents(run_dir, name, checkpoint, base_model, api)
        _refuse_secrets(files)
        _upload(api, name, files, private, revision)
    except UserError:
        raise
    except Exception as error:
        # The Hub, the network and the layers of the client raise many kinds of errors. Their texts may contain a token
        # or a signed address, and so would a chained traceback.
        reason = one_line(error, huggingface_hub.get_token())
        raise PushError(f"{name} is not pushed ({reason}): the same command resumes the push") from None
    return {"url": f"{api.endpoint}/{name}" + (f"/tree/{revision}" if revision else ""), "files": sorted(files)}


def push_finished(
    run_dir: Path, repo_id: str | None, private: bool | None, revision: str | None = None
) -> dict[str, Any]:
    """Push at the end of a training. If the push fails, a `PushError` gives the command that tries again."""
    try:
        return push(run_dir, repo_id, private=private, revision=revision)
    except (UserError, KeyboardInterrupt) as error:
        # Ctrl-C here interrupts only the upload: the message says that the run itself is complete.
        again = f"grpo-math push {shlex.quote(str(run_dir))} --repo_id {repo_id or Path(run_dir).resolve().name}"
        again += " --private" * bool(private) + (f" --revision {revision}" if revision else "")
        message = f"the run is complete in {run_dir}, but not on the Hub ({str(error) or 'interrupted'}): {again}"
        raise PushError(message) from None


def contents(
    run_dir: Path, repo_id: str, checkpoint: str | None = None, base_model: str | None = None, api: Any = None
) -> dict[str, Path | bytes]:
    """Return the files of the repository by name: a path, or the content. The base's licence comes from ``api``."""
    if (saved := weights_in(named(run_dir, checkpoint))) is None:
        reason, remedy = "contains no adapter/ or model/ with *.safetensors", "save the trained weights there"
        raise ConfigError("run_dir", str(run_dir), reason, remedy)
    kind, weights = saved
    # A script of the user may not have written the report.
    if not (run_dir / "report.html").exists():
        report(run_dir)
    run = read_run(run_dir)
    # after.json is the evaluation of the last weights, and not of this checkpoint.
    if checkpoint:
        run.after = None
    base = trained_base(run, base_model, api)
    saved_files = filter_repo_objects(weights.iterdir(), allow_patterns=MODEL_FILES, key=lambda path: path.name)
    files: dict[str, Path | bytes] = {path.name: path for path in saved_files}
    files |= {name: run_dir / name for name in result_files(run_dir, checkpoint)}
    files |= {f"plots/{path.name}": path for path in run_dir.glob("plots/*.png")}
    if kind == "adapter":
        # peft writes the base's folder on this machine into the configuration.
        config = read_json(weights / "adapter_config.json")
        config["base_model_name_or_path"] = base["hub"] or base["folder"]
        files["adapter_config.json"] = json.dumps(config, indent=2, sort_keys=True).encode()
    files["README.md"] = model_card(run, repo_id, base, kind, checkpoint and weights.name).encode()
    return files


def _refuse_secrets(files: Mapping[str, Path | bytes]) -> None:
    """Refuse to publish a text with the token, or with the value of another secret variable of the environment."""
    for name, content in files.items():
        # Weights may be gigabytes, and neither weights nor plots contain text of the environment.
        if name.endswith((".safetensors", ".png")):
            continue
        text = content.read_bytes() if isinstance(content, Path) else content
        if any(secret.encode() in text for secret in known_secrets(huggingface_hub.get_token())):
            raise UserError(f"{name} of the run contains a token or key of this environment: remove it, then push")


def _upload(
    api: Any, repo_id: str, files: Mapping[str, Path | bytes], private: bool | None, revision: str | None
) -> None:
    """Make the repository and the branch if they do not exist, and commit the files."""
    # create_repo ignores ``private`` if the repository exists, so the answer of the Hub is checked below.
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    existing = api.model_info(repo_id, revision=revision)
    if private and not existing.private:
        remedy = "make it private in its settings, or leave out --private"
        raise ConfigError("repo_id", repo_id, "is a public repository already", remedy)
    others = {file.rfilename for file in existing.siblings or []} - files.keys()
    if loaded := sorted(filter_repo_objects(others, allow_patterns=LOADED)):
        reason = f"contains {loaded[0]}, which would be loaded with what is pushed"
        raise ConfigError("repo_id", repo_id, reason, "give another repository, or delete that file first")
    # One commit for all files: an interrupted push never publishes weights without their card and configuration.
    additions = [huggingface_hub.CommitOperationAdd(name, content) for name, content in files.items()]
    api.create_commit(repo_id, additions, commit_message="A run of grpo_math", revision=revision)


def _set_time_limit() -> None:
    """Give huggingface_hub a time limit, and silence its log: lines about retries would show signed addresses."""

    # The default client has no time limit: a dead connection would keep a finished run, and its GPUs, waiting.
    def client() -> Any:
        http = default_client_factory()
        http.timeout = SECONDS
        return http

    huggingface_hub.set_client_factory(client)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
