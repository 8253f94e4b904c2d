"""A finished run -> a repository on the Hub: weights in safetensors, tokenizer, model card, results, report.

What reaches the repository is named here, file by file: no optimizer, no checkpoint, no pickle. `push` is safe to
repeat. Each large file is uploaded for itself before the one commit that names them all, and the Hub knows contents by
their hash, so that a push that was cut goes on with what the repository lacks. The same files make no second commit.

A failure of the network or the Hub (5xx, 408, 429, a connection that breaks, no answer in `SECONDS`) is tried again
after `WAITS` seconds, then ends in a `PushError`; what the user has to put right is a `UserError` at once. Where
`huggingface_hub` uploads through Xet, hf_xet tries again by itself.

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
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from grpo_math.checks.services import check_repo_id, offline, owners
from grpo_math.errors import ConfigError, PushError, UserError
from grpo_math.generation.models import EMBEDDED
from grpo_math.planner.model import is_folder
from grpo_math.reading import home, read_object, real
from grpo_math.report import report
from grpo_math.report.card import RESULTS, Base, base_of, model_card
from grpo_math.report.merged import merge
from grpo_math.report.run_dir import Run, read_run
from grpo_math.run import lock
from grpo_math.run.checkpoints import FINISHED, SUMS
from grpo_math.run.redact import one_line, secret_values
from grpo_math.run.weights import weights_in

WAITS = (2, 5, 10, 20)  # seconds before the second, third, ... attempt
SECONDS = 120.0  # without a byte from the Hub, until an attempt is given up

# Of adapter/ or model/: the weights, the configuration and the tokenizer.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt")
# Sums of files that are changed here, and what a script's run has beside weights that stand in the run directory.
NOT_OF_A_MODEL = (SUMS, FINISHED, "before.json", "after.json", "training_history.json", "trainer_state.json")
# What a loader would read beside, or instead of, what is pushed.
LOADED = ("adapter_config.json", "adapter_model.*", "model*.safetensors", "*.safetensors.index.json", "pytorch_model*")
# Modules whose errors may pass. Not Python's own ConnectionError: it is hf_xet's, which has tried for minutes.
NETWORK = ("httpx", "httpx2", "httpcore", "requests")

Content = Path | bytes
T = TypeVar("T")


def push(
    run_dir: str | Path,
    repo_id: str | None = None,
    *,
    private: bool | None = None,
    merge: bool = False,
    base_model: str | None = None,
    revision: str | None = None,
) -> dict[str, Any]:
    """Push a run to ``repo_id`` (default: the run directory's name, under the token's user); {"url", "files"}.

    ``private`` True makes a private repository, and refuses a public one that is there; None leaves the choice to the
    Hub's own setting. ``merge`` adds the adapter to the base in bfloat16 and pushes the whole model. ``base_model`` is
    the base's name on the Hub, where the run was trained from a folder. ``revision``: a branch, made if it is not
    there.

    Raises, each in one line: `UserError` for what the user can put right (a run that has not ended, a name, a token, a
    repository that holds something else), `PushError`, which is one too, where the Hub or the network ended it.

    >>> push("runs/nowhere", "ada/sums")
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: run_dir='runs/nowhere' is not a folder: ...
    """
    run, kind, folder = _finished(Path(run_dir), merge)
    if base_model:
        check_repo_id("base_model", base_model)
    if offline():
        raise ConfigError("repo_id", repo_id, "cannot be pushed to while HF_HUB_OFFLINE is set", "unset it")
    wanted = repo_id or real(run.directory).name
    check_repo_id("repo_id", wanted)
    with _patient():
        import huggingface_hub

        api = huggingface_hub.HfApi()
        owner = _again(owners, wanted)[0]  # a token that cannot write is said before anything is made
        repo_id = wanted if "/" in wanted else f"{owner}/{wanted}"
        base = base_of(run.config, base_model)
        base = base._replace(licence=_licence(api, run, base))
        if not (run.directory / "report.html").exists():
            report(run.directory)
        files = _files(run, folder, base, kind)
        files["README.md"] = model_card(run, repo_id, base, kind).encode("utf-8")
        _refuse_secrets(files)
        _again(lambda: api.create_repo(repo_id, private=private, exist_ok=True), repo_id)
        if revision:
            _again(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True), repo_id)
        there = _again(lambda: api.model_info(repo_id, revision=revision), repo_id)
        if private and not there.private:
            reason = "is a public repository already"
            raise ConfigError("repo_id", repo_id, reason, "make it private in its settings, or leave out --private")
        # Beside the run, since /tmp may be too small for a whole model.
        room = tempfile.TemporaryDirectory(prefix=".merged-", dir=run.directory) if kind == "merged" else nullcontext()
        with room as scratch:
            if scratch:
                files |= _merged(folder, run, Path(scratch))
            _refuse_strangers(repo_id, [file.rfilename for file in there.siblings or []], files)
            _upload(api, repo_id, revision, files, there.sha)
    at = f"/tree/{revision}" if revision else ""
    return {"url": f"{api.endpoint}/{repo_id}{at}", "files": sorted(files)}


def prepared(
    run_dir: str | Path, repo_id: str | None = None, *, merge: bool = False, base_model: str | None = None
) -> dict[str, Any]:
    """What `push` would push, without a token or the Hub: {"repo_id", "card", "files": name -> bytes}.

    The owner is left out of a ``repo_id`` that names none, the licence of a base on the Hub is not looked up, and the
    size of weights that would be merged is not known (None is given).
    """
    run, kind, folder = _finished(Path(run_dir), merge)
    if base_model:
        check_repo_id("base_model", base_model)
    repo_id = repo_id or real(run.directory).name
    check_repo_id("repo_id", repo_id)
    base = base_of(run.config, base_model)
    base = base._replace(licence=_licence(None, run, base))
    if not (run.directory / "report.html").exists():
        report(run.directory)
    files: dict[str, Content] = _files(run, folder, base, kind)
    card = model_card(run, repo_id, base, kind)
    files["README.md"] = card.encode("utf-8")
    _refuse_secrets(files)
    sizes: dict[str, int | None] = {name: _size(content) for name, content in files.items()}
    if kind == "merged":
        sizes["model.safetensors"] = None
    return {"repo_id": repo_id, "card": card, "files": dict(sorted(sizes.items()))}


def push_finished(
    run_dir: Path, repo_id: str | None, private: bool | None, revision: str | None = None
) -> dict[str, Any]:
    """The push that ends a training. If it fails the run is whole on disk, and the error names the command that tries
    again; every failure that has a line is a `PushError`, so that the exit code is 1."""
    try:
        return push(run_dir, repo_id, private=private, revision=revision)
    except (UserError, KeyboardInterrupt) as error:
        again = f"grpo-math push {shlex.quote(str(run_dir))} --repo_id {repo_id or real(run_dir).name}"
        again += " --private" * bool(private) + (f" --revision {revision}" if revision else "")
        said = f"the run is whole in {run_dir}, and is not on the Hub ({str(error) or 'interrupted'}): {again}"
        raise PushError(said) from None


# What is pushed


def _finished(run_dir: Path, merge: bool) -> tuple[Run, str, Path]:
    """The run, the kind of its repository, and the folder of its weights."""
    run = read_run(run_dir)
    if not run.config:
        reason = "holds no config.yaml that can be read"
        raise ConfigError("run_dir", str(run_dir), reason, "give the run directory that training wrote")
    if owner := lock.owner(run_dir):
        reason = f"is in use: {owner} trains there"
        raise ConfigError("run_dir", str(run_dir), reason, "push when it has ended, or train with --push_to_hub")
    if not (run_dir / FINISHED).exists():  # what adapter/ may hold is then of an earlier, shorter run
        reason = "holds a run that has not finished"
        remedy = "start the training again: it goes on where it stopped; then push"
        raise ConfigError("run_dir", str(run_dir), reason, remedy)
    if (found := weights_in(run_dir)) is None:
        reason = "holds no adapter/ or model/ with *.safetensors"
        remedy = "put the trained weights back (in a script of your own: trainer.save_model())"
        raise ConfigError("run_dir", str(run_dir), reason, remedy)
    kind, folder = found
    if merge and kind == "model":
        raise ConfigError("merge", True, "would be ignored: all weights were trained", "leave it out")
    return run, "merged" if merge else kind, folder


def _files(run: Run, folder: Path, base: Base, kind: str) -> dict[str, Content]:
    """Where each file stands in the repository, and what it holds; all but the card and merged weights."""
    files = _of_a_model(folder)
    if kind == "merged":
        files = {name: content for name, content in files.items() if not name.startswith("adapter_")}
    elif kind == "adapter":
        said = read_object(folder / "adapter_config.json") or {}
        said["base_model_name_or_path"] = base.hub or base.folder  # not a folder of this machine
        files["adapter_config.json"] = (json.dumps(said, indent=2, sort_keys=True) + "\n").encode("utf-8")
    files |= {name: run.directory / name for name in RESULTS if (run.directory / name).exists()}
    return files | {f"plots/{path.name}": path for path in sorted((run.directory / "plots").glob("*.png"))}


def _of_a_model(folder: Path) -> dict[str, Content]:
    there = sorted(path for path in folder.iterdir() if path.name not in NOT_OF_A_MODEL)
    return {path.name: path for path in there if _is_any(path.name, WEIGHTS)}


def _merged(adapter: Path, run: Run, folder: Path) -> dict[str, Content]:
    """The base in bfloat16 with the adapter added, as the files of a model, made in ``folder``.

    Weights that are stored in fewer bits are refused; of a base that was only trained in 4 bit the full weights are
    taken, which is said.
    """
    name = str(run.config.get("model_name_or_path"))
    if run.config.get("load_in_4bit") or run.config.get("load_in_8bit"):
        _say("the adapter was trained on a quantised base, and is merged into the full one: evaluate what comes of it")
    _say(f"merging base and adapter in bfloat16: {name}")
    merge(name, str(run.config.get("model_revision") or "main"), adapter, folder)
    return _of_a_model(folder)


def _licence(api: Any, run: Run, base: Base) -> dict[str, Any]:
    """The licence of the base as its own card has it, in its folder or on the Hub; {} where that is not known."""
    from huggingface_hub import metadata_load

    name = str(run.config.get("model_name_or_path"))
    if name == EMBEDDED:
        return {"license": "apache-2.0"}
    card, said = home(name) / "README.md", {}
    try:
        if is_folder(name) and card.exists():
            said = metadata_load(card) or {}
        elif base.hub and api is not None:
            revision = None if base.revision == "main" else base.revision
            if found := _again(lambda: api.model_info(base.hub, revision=revision), base.hub).card_data:
                said = found.to_dict()
    except (UserError, ValueError, OSError):
        return {}
    return {key: said[key] for key in ("license", "license_name", "license_link") if isinstance(said.get(key), str)}


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _refuse_secrets(files: dict[str, Content]) -> None:
    """Nothing is published that holds the token, or what another secret variable of the environment holds."""
    for name, content in files.items():
        if not name.endswith((".safetensors", ".png")):
            text = content if isinstance(content, bytes) else content.read_bytes()
            if any(secret.encode() in text for secret in _secrets()):
                raise UserError(f"{name} of the run holds a token or key of this environment: take it out, then push")


def _refuse_strangers(repo_id: str, there: list[str], files: dict[str, Content]) -> None:
    """Weights of another shape in the repository would be loaded beside ours, or in their place."""
    strange = [name for name in there if _is_any(name, LOADED) and name not in files]
    if strange:
        reason = f"holds {strange[0]}, which would be loaded with what is pushed"
        raise ConfigError("repo_id", repo_id, reason, "give another repository, or delete that file first")


# The Hub


def _upload(api: Any, repo_id: str, revision: str | None, files: dict[str, Content], head: str | None) -> None:
    """The large files one by one, then one commit of everything on ``head``.

    Each attempt starts from what the repository holds by then: had a commit come through whose answer was lost, the
    next attempt finds nothing to do.
    """
    from huggingface_hub import CommitOperationAdd

    def add(name: str) -> CommitOperationAdd:
        content = files[name]
        return CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))

    large = sorted((name for name in files if name.endswith(".safetensors")), key=lambda name: -_size(files[name]))
    for number, name in enumerate(large, start=1):
        _say(f"{number} of {len(large)}: {name}, {_size(files[name]) / 1e6:,.1f} MB")
        _again(lambda name=name: api.preupload_lfs_files(repo_id, [add(name)], revision=revision), repo_id)  # type: ignore[misc]
    about = {"commit_message": "A run of grpo_math", "revision": revision}
    made = _again(lambda: api.create_commit(repo_id, map(add, sorted(files)), **about), repo_id)
    _say("all of it was there already" if made.oid == head else f"one commit of {len(files)} files")


def _size(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _again(attempt: Callable[[], T], repo_id: str) -> T:
    """The answer of the first attempt that gets one; a failure that would only repeat itself is raised at once."""
    for wait in (*WAITS, None):
        try:
            return attempt()
        except UserError:
            raise
        except Exception as error:
            causes = list(_causes(error))
            responses = [getattr(cause, "response", None) for cause in causes]
            response = next((response for response in responses if response is not None), None)
            status = getattr(response, "status_code", None)
            if status is not None or not any(type(cause).__module__.partition(".")[0] in NETWORK for cause in causes):
                said = one_line(getattr(response, "text", "") or error, _secrets())
                if (refusal := _refusal(error, status, said, repo_id)) is not None:
                    raise refusal from None
            why = f"HTTP {status}" if status else type(causes[-1]).__name__
            if wait is None:
                said = f"{repo_id} is not pushed: the Hub does not answer as it should ({why}, {len(WAITS) + 1} times)"
                raise PushError(f"{said}: the same command goes on from here") from None
        _say(f"{why}: again in {wait} seconds")
        time.sleep(wait)
    raise AssertionError("unreachable")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was made from: a thread of an upload wraps its own."""
    while error is not None:
        yield error
        error = error.__cause__


def _refusal(error: Exception, status: int | None, said: str, repo_id: str) -> UserError | None:
    """The line that a failure ends with; None for a status that may pass: 409 and 412 too, somebody else is writing."""
    if status == 401:
        return UserError(f"the Hub does not take this token for {repo_id} (401): hf auth login, or another HF_TOKEN")
    if status == 403:
        return UserError(f"this token may not write to {repo_id} (403, {said}): give another repo_id or token")
    if status == 404:
        return UserError(f"{repo_id} is not there, or is hidden from this token (404): check the name and the token")
    if status in (400, 402, 413, 422):
        return PushError(f"the Hub refuses {repo_id} ({status}, {said}): put right what it names")
    if status is not None:
        return None
    if not isinstance(error, (ValueError, OSError, RuntimeError)):
        raise error
    return PushError(f"{repo_id} is not pushed ({type(error).__name__}: {said}): the same command goes on from here")


def _secrets() -> set[str]:
    import huggingface_hub

    return secret_values(os.environ) | {token for token in (huggingface_hub.get_token(),) if token}


@contextmanager
def _patient() -> Iterator[None]:
    """huggingface_hub waits for ever and tells of each of its own retries, with signed addresses; not here."""
    import huggingface_hub
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from huggingface_hub.utils._http import default_client_factory

    def client() -> Any:
        made = default_client_factory()
        made.timeout = SECONDS
        return made

    log = logging.getLogger("huggingface_hub")
    before, bars = log.level, not are_progress_bars_disabled()
    huggingface_hub.set_client_factory(client)
    log.setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    finally:
        huggingface_hub.set_client_factory(default_client_factory)
        log.setLevel(before)
        if bars:
            enable_progress_bars()


def _say(text: str) -> None:
    print(f"push     {text}", file=sys.stderr, flush=True)
