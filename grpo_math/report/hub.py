"""Push a finished run to a repository on the Hub: weights in safetensors, tokenizer, model card, results, report.

`ALLOWED` names every file that may be uploaded: no optimizer, no checkpoint, no pickle. `push` can be repeated: the Hub
knows contents by their hash, so an interrupted push continues with what the repository lacks.

After a failure of the network or the Hub, the push is tried again after `WAITS` seconds, then ends in a `PushError`. An
error that the user has to correct is raised at once, as a `UserError`.

The only module that writes to the network. Does not train, evaluate, or delete anything on the Hub.
"""

import json
import logging
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from grpo_math.checks.services import check_repo_id, offline, owners
from grpo_math.errors import ConfigError, PushError, UserError
from grpo_math.reading import read_json
from grpo_math.report import report
from grpo_math.report.card import RESULTS, base_of, model_card
from grpo_math.report.merged import merge as merge_into
from grpo_math.report.run_dir import Run, read_run
from grpo_math.run import lock
from grpo_math.run.checkpoints import FINISHED, named
from grpo_math.run.redact import one_line, secret_values
from grpo_math.run.weights import weights_in

WAITS = (2, 5, 10, 20)  # seconds before the second, third, ... attempt
SECONDS = 120.0  # without a byte from the Hub, until an attempt is given up
PASSING = (408, 409, 412, 429, 500, 502, 503, 504)  # statuses of a Hub that is busy, or that somebody else writes to
REMEDIES = {
    401: "the Hub does not take this token: hf auth login, or another HF_TOKEN",
    403: "this token may not write there: give another repo_id or token",
    404: "it does not exist, or is hidden from this token: check the name and the token",
}
OF_A_MODEL = (
    *("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model"),
)
ALLOWED = [*OF_A_MODEL, *RESULTS, "README.md", "plots/*.png"]
# A loader would read these together with the pushed files, or instead of them.
LOADED = ("adapter_config.json", "adapter_model.*", "model*.safetensors", "*.safetensors.index.json", "pytorch_model*")

T = TypeVar("T")


class Pushable(NamedTuple):
    """A finished run. ``kind`` is adapter, model or merged; ``weights`` is the folder of its weights; ``name`` is the
    name of the repository, and ``base_model`` the name of the base, if the user gave it."""

    run: Run
    kind: str
    weights: Path
    name: str
    base_model: str | None


def push(
    run_dir: str | Path,
    repo_id: str | None = None,
    *,
    private: bool | None = None,
    merge: bool = False,
    base_model: str | None = None,
    revision: str | None = None,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Push a run to ``repo_id`` (default: the run directory's name, under the token's user). Return {"url", "files"}.

    ``private`` True makes a private repository, and refuses a public one that exists; None leaves the choice to the
    Hub's own setting. ``merge`` adds the adapter to the base in bfloat16 and pushes the whole model. ``base_model`` is
    the base's name on the Hub, if the run was trained from a folder. ``revision``: a branch, made if it does not exist.
    ``checkpoint``: best, or the name of a checkpoint's folder; by default the last weights.

    Raises `UserError` if the user can correct the cause (a run that has not ended, a name, a token, a repository with
    other weights), and `PushError`, which is a `UserError` too, if the Hub or the network failed.

    >>> push("runs/nowhere", "ada/sums")
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: run_dir='runs/nowhere' contains no config.yaml: give the run directory ...
    """
    pushable = _pushable(Path(run_dir), repo_id, merge, base_model, checkpoint)
    if offline():
        raise ConfigError("repo_id", repo_id, "cannot be pushed to while HF_HUB_OFFLINE is set", "unset it")
    import huggingface_hub

    _set_time_limit()
    api = huggingface_hub.HfApi()
    owner = _again(owners, pushable.name)[0]  # a token that cannot write is reported before anything is made
    name = pushable.name if "/" in pushable.name else f"{owner}/{pushable.name}"
    with _staged(pushable._replace(name=name), api) as (folder, files):

        def upload() -> None:
            api.create_repo(name, private=private, exist_ok=True)
            if revision:
                api.create_branch(name, branch=revision, exist_ok=True)
            existing = api.model_info(name, revision=revision)
            if private and not existing.private:
                reason = "is a public repository already"
                raise ConfigError("repo_id", name, reason, "make it private in its settings, or leave out --private")
            _refuse_other_weights(name, [file.rfilename for file in existing.siblings or []], files)
            message = "A run of grpo_math"
            api.upload_folder(
                repo_id=name, folder_path=folder, allow_patterns=ALLOWED, commit_message=message, revision=revision
            )

        _again(upload, name)
    return {"url": f"{api.endpoint}/{name}" + (f"/tree/{revision}" if revision else ""), "files": files}


def prepared(
    run_dir: str | Path,
    repo_id: str | None = None,
    *,
    merge: bool = False,
    base_model: str | None = None,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Return what `push` would push, without a token or the Hub: {"repo_id", "card", "files": name -> bytes}.

    A ``repo_id`` without an owner stays without one, and the licence of a base on the Hub is not looked up. Weights
    that would be merged are not among the files.
    """
    pushable = _pushable(Path(run_dir), repo_id, merge, base_model, checkpoint)
    with _staged(pushable, None) as (folder, files):
        sizes = {name: (folder / name).stat().st_size for name in files}
        return {"repo_id": pushable.name, "card": (folder / "README.md").read_text(encoding="utf-8"), "files": sizes}


def push_finished(
    run_dir: Path, repo_id: str | None, private: bool | None, revision: str | None = None
) -> dict[str, Any]:
    """Push at the end of a training. If the push fails, a `PushError` gives the command that tries again."""
    try:
        return push(run_dir, repo_id, private=private, revision=revision)
    except (UserError, KeyboardInterrupt) as error:
        again = f"grpo-math push {shlex.quote(str(run_dir))} --repo_id {repo_id or Path(run_dir).resolve().name}"
        again += " --private" * bool(private) + (f" --revision {revision}" if revision else "")
        message = f"the run is complete in {run_dir}, but not on the Hub ({str(error) or 'interrupted'}): {again}"
        raise PushError(message) from None


# Files


def _pushable(
    run_dir: Path, repo_id: str | None, merge: bool, base_model: str | None, checkpoint: str | None
) -> Pushable:
    """Check that the run has finished and has weights, and that the names can be names on the Hub."""
    owner, saved = lock.owner(run_dir), weights_in(named(run_dir, checkpoint))
    finished = (run_dir / FINISHED).exists()  # without it, the adapter may be an earlier, shorter run's
    for is_refused, reason, remedy in (
        (not (run_dir / "config.yaml").exists(), "contains no config.yaml", "give the run directory of a training"),
        (owner, f"is in use: {owner} trains there", "push when it has ended, or train with --push_to_hub"),
        (not finished, "has not finished", "start the training again to resume it; then push"),
        (not saved, "contains no adapter/ or model/ with *.safetensors", "save the trained weights there"),
    ):
        if is_refused:
            raise ConfigError("run_dir", str(run_dir), reason, remedy)
    assert saved is not None
    kind, weights = saved
    if merge and kind == "model":
        raise ConfigError("merge", True, "would be ignored: all weights were trained", "leave it out")
    name = repo_id or run_dir.resolve().name
    check_repo_id("repo_id", name)
    if base_model:
        check_repo_id("base_model", base_model)
    run = read_run(run_dir)
    if checkpoint:
        run.after = None  # of the last weights
    return Pushable(run, "merged" if merge else kind, weights, name, base_model)


@contextmanager
def _staged(pushable: Pushable, api: Any) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder with links to the files of the repository, and their names. It is removed afterwards.

    Without ``api`` nothing is merged.
    """
    run, kind, base = pushable.run, pushable.kind, base_of(pushable.run, pushable.base_model, api)
    merges = kind == "merged"
    if not (run.directory / "report.html").exists():
        report(run.directory)
    # A merged model may be too large for /tmp.
    with tempfile.TemporaryDirectory(prefix=".push-", dir=run.directory if merges else None) as scratch:
        folder = Path(scratch)
        if merges and api:
            merge_into(str(run.config["model_name_or_path"]), base.revision, pushable.weights, folder)
        files = {path.name: path for path in pushable.weights.iterdir() if _is_any(path.name, OF_A_MODEL)}
        if kind == "adapter":
            # The base is named without a folder of this machine.
            config = read_json(files.pop("adapter_config.json"))
            config["base_model_name_or_path"] = base.hub or base.folder
            (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        elif merges:
            files = {name: path for name, path in files.items() if not name.startswith("adapter_")}
        files |= {name: run.directory / name for name in RESULTS if (run.directory / name).exists()}
        files |= {f"plots/{path.name}": path for path in run.directory.glob("plots/*.png")}
        (folder / "plots").mkdir()
        for name, path in files.items():
            if not (folder / name).exists():
                (folder / name).symlink_to(path.resolve())
        (folder / "README.md").write_text(model_card(run, pushable.name, base, kind), encoding="utf-8")
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        _refuse_secrets(folder, names)
        yield folder, names


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _refuse_secrets(folder: Path, names: list[str]) -> None:
    """Refuse to publish a text with the token, or with the value of another secret variable of the environment."""
    for name in names:
        content = b"" if name.endswith((".safetensors", ".png")) else (folder / name).read_bytes()
        if any(secret.encode() in content for secret in _secrets()):
            raise UserError(f"{name} of the run contains a token or key of this environment: remove it, then push")


def _refuse_other_weights(repo_id: str, existing: list[str], files: list[str]) -> None:
    """Refuse a repository with other weight files: a loader would read these with the pushed files, or instead."""
    if others := [name for name in existing if _is_any(name, LOADED) and name not in files]:
        reason = f"contains {others[0]}, which would be loaded with what is pushed"
        raise ConfigError("repo_id", repo_id, reason, "give another repository, or delete that file first")


# The Hub


def _again(attempt: Callable[[], T], repo_id: str) -> T:
    """Return the result of the first attempt that succeeds. Raise a failure that another attempt would repeat."""
    waits = list(WAITS)
    while True:
        try:
            return attempt()
        except UserError:
            raise
        except Exception as error:
            status, message = _failure(error)
        if status not in PASSING or not waits:
            kind = UserError if status in REMEDIES else PushError
            remedy = REMEDIES.get(status, "the same command resumes the push")
            raise kind(f"{repo_id} is not pushed ({one_line(message, _secrets())}): {remedy}")
        _say(f"{message}: again in {waits[0]} seconds")
        time.sleep(waits.pop(0))


def _failure(error: BaseException | None) -> tuple[int, str]:
    """Return the HTTP status of a failure, 503 for a network error and 0 for any other error, and its message."""
    first = error
    while error is not None:  # a thread of an upload wraps the error of the request
        if (response := getattr(error, "response", None)) is not None:
            text = "" if response.status_code in PASSING else f", {response.text or error}"
            return response.status_code, f"HTTP {response.status_code}{text}"
        if type(error).__module__.startswith("http"):  # httpx, httpx2, httpcore
            return 503, type(error).__name__
        error = error.__cause__ or error.__context__
    return 0, f"{type(first).__name__}: {first}"


def _secrets() -> set[str]:
    import huggingface_hub

    return secret_values(os.environ) | {token for token in (huggingface_hub.get_token(),) if token}


def _set_time_limit() -> None:
    """Give huggingface_hub a time limit, and silence its log: lines about retries would show signed addresses."""
    import huggingface_hub
    from huggingface_hub.utils._http import default_client_factory

    def client() -> Any:
        made = default_client_factory()
        made.timeout = SECONDS
        return made

    huggingface_hub.set_client_factory(client)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _say(text: str) -> None:
    print(f"push     {text}", file=sys.stderr, flush=True)
