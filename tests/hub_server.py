"""A stand-in for the Hub, in a thread: the part of its HTTP API that `huggingface_hub` uses to push and to load back.

Users and their tokens, repositories with branches, the check of a card's metadata, regular and LFS files, commits,
and downloads.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from small_http import SmallHTTP, body_of, send

TOKENS = {"hf_of_ada_0123456789": ("ada", "write"), "hf_reader_0123456789": ("ada", "read")}
LFS_FROM = 10_000_000  # bytes; and whatever is no text


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, dict[str, str]] = field(default_factory=lambda: {"main": {}})  # name -> path -> sha256
    commits: list[dict[str, Any]] = field(default_factory=list)


class HubServer(SmallHTTP):
    protocol = "HTTP/1.1"

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # by sha256: what was uploaded, committed or not
        self.lfs: set[str] = set()  # the sha256 of those that came as LFS
        self.asked: list[str] = []  # "METHOD /path" of all requests
        self.bodies: list[bytes] = []  # of all requests that were read whole
        self.lock = threading.RLock()
        super().__init__()

    def times(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in self.asked)

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(f"{request.command} {request.path}")
        body = body_of(request)
        self.bodies.append(body)
        with self.lock:
            self.route(request, urlsplit(request.path), body)

    def route(self, request: BaseHTTPRequestHandler, url: Any, body: bytes) -> None:
        path, method = unquote(url.path), request.command
        user, role = TOKENS.get(request.headers.get("Authorization", "").removeprefix("Bearer "), (None, None))
        if path == "/api/whoami-v2":
            if user is None:
                return _send(request, 401, {"error": "Invalid credentials in Authorization header"})
            details = {"type": "user", "name": user, "orgs": [{"name": "lovelace"}]}
            return _send(request, 200, {**details, "auth": {"accessToken": {"role": role}}})
        if path == "/api/validate-yaml":
            errors = card_errors(json.loads(body)["content"])
            return _send(request, 400 if errors else 200, {"errors": [{"message": e} for e in errors], "warnings": []})
        if path == "/api/repos/create":
            return self.create(request, json.loads(body), user)
        if results := re.fullmatch(r"/object/(\w+)", path):
            return self.upload(request, results[1], body)
        if results := re.fullmatch(r"/(?:api/models/)?([\w.-]+/[\w.-]+?)(?:\.git)?(?:/(.*))?", path):
            name, others = results[1], results[2] or ""
            repository = self.repositories.get(name)
            if repository is None:
                return _send(request, 404, {"error": "Repository not found"}, "RepoNotFound")
            if path.startswith("/api/models/"):
                return self.api(request, name, repository, others, body)
            if others == "info/lfs/objects/batch":
                return self.batch(request, json.loads(body))
            if results := re.fullmatch(r"resolve/([^/]+)/(.+)", others):
                return self.resolve(request, repository, results[1], results[2])
        return _send(request, 404, {"error": f"no such address: {method} {path}"})

    def create(self, request: Any, asked: dict[str, Any], user: str | None) -> None:
        owner = asked.get("organization") or user
        name = f"{owner}/{asked['name']}"
        if owner not in (user, "lovelace"):
            return _send(request, 403, {"error": f"You don't have the rights to create a model under {owner}"})
        if name in self.repositories:
            return _send(request, 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"})
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.repositories[name] = Repository(private)
        return _send(request, 200, {"url": f"{self.url}/{name}", "name": name})

    def api(self, request: Any, name: str, repository: Repository, others: str, body: bytes) -> None:
        verb, _, revision = others.partition("/")
        if verb == "branch":
            repository.branches[revision] = dict(repository.branches["main"])
            return _send(request, 200, {})
        files = self.files(repository, revision or "main")
        if files is None:
            return _send(request, 404, {"error": "Invalid rev id"}, "RevisionNotFound")
        if verb in ("", "revision"):
            card = files.get("README.md")
            details = {
                "id": name,
                "modelId": name,
                "sha": _sha(repository, revision or "main"),
                "private": repository.private,
                "tags": [],
                "siblings": [{"rfilename": path} for path in files],
                **({"cardData": yaml.safe_load(self.objects[card].split(b"---")[1])} if card else {}),
            }
            return _send(request, 200, details)
        if verb == "preupload":
            answers = []
            for file in json.loads(body)["files"]:
                large = file["size"] > LFS_FROM or b"\0" in base64.b64decode(file["sample"])
                oid = files.get(file["path"])
                if oid is not None and oid not in self.lfs:
                    oid = _git_hash(self.objects[oid])
                mode = "lfs" if large else "regular"
                answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
            return _send(request, 200, {"files": answers})
        if verb == "commit":
            return self.commit(request, name, repository, revision, [json.loads(line) for line in body.splitlines()])
        return _send(request, 404, {"error": f"no such address: {others}"})

    def commit(self, request: Any, name: str, repository: Repository, revision: str, lines: list[Any]) -> None:
        files = dict(repository.branches[revision])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                content = base64.b64decode(value["content"])
                sha = hashlib.sha256(content).hexdigest()
                self.objects[sha] = content
                files[value["path"]] = sha
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.objects:
                    return _send(request, 400, {"error": f"LFS pointer pointed to a file that does not exist: {value}"})
                self.lfs.add(value["oid"])
                files[value["path"]] = value["oid"]
        repository.branches[revision] = files
        repository.commits.append({"branch": revision, "paths": [line["value"].get("path") for line in lines[1:]]})
        sha = _sha(repository, revision)
        return _send(request, 200, {"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha, "success": True})

    def batch(self, request: Any, asked: dict[str, Any]) -> None:
        answers = []
        for one in asked["objects"]:
            oid, size = one["oid"], one["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.objects:
                answer["actions"] = {"upload": {"href": f"{self.url}/object/{oid}?signature=s", "header": {}}}
            answers.append(answer)
        return _send(request, 200, {"transfer": "basic", "objects": answers})

    def upload(self, request: Any, oid: str, body: bytes) -> None:
        """Storage: it takes no token, as the real one, whose addresses are signed."""
        assert "Authorization" not in request.headers
        if hashlib.sha256(body).hexdigest() != oid:
            return _send(request, 400, {"error": "the content is not what was announced"})
        self.objects[oid] = body
        return _send(request, 200, {})

    def resolve(self, request: Any, repository: Repository, revision: str, path: str) -> None:
        files = self.files(repository, revision)
        if files is None or path not in files:
            code = "RevisionNotFound" if files is None else "EntryNotFound"
            return _send(request, 404, {"error": "Entry not found"}, code)
        content = self.objects[files[path]]
        branch = next(name for name in repository.branches if revision in (name, _sha(repository, name)))
        return send(request, 200, content, {"X-Repo-Commit": _sha(repository, branch), "ETag": f'"{files[path]}"'})

    def files(self, repository: Repository, revision: str) -> dict[str, str] | None:
        known = {_sha(repository, name): files for name, files in repository.branches.items()}
        return (repository.branches | known).get(revision)


def card_errors(text: str) -> list[str]:
    """What the Hub says of a card's metadata: the rules of its model cards that a run of ours could break."""
    results = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if not results:
        return ["empty or missing yaml metadata"]
    try:
        data = yaml.safe_load(results[1])
    except yaml.YAMLError as error:
        return [f"YAML: {error}"]
    errors = []
    name = re.compile(r"[\w][\w.-]*/[\w.-]+")
    for key in ("base_model", "datasets"):
        for value in [data[key]] if isinstance(data.get(key), str) else data.get(key, []):
            if not name.fullmatch(value):
                errors.append(f'"{key}" with value "{value}" is not valid. Use an id from the Hub.')
    if data.get("base_model_relation", "adapter") not in ("adapter", "finetune", "merge", "quantized"):
        errors.append('"base_model_relation" must be one of adapter, finetune, merge, quantized')
    if "license" in data and not re.fullmatch(r"[a-z0-9.-]+", str(data["license"])):
        errors.append('"license" must be an identifier')
    for model in data.get("model-index", []):
        if not model.get("name") or not model.get("results"):
            errors.append('"model-index[0].name" and "results" are required')
        for result in model.get("results", []):
            if not result.get("task", {}).get("type") or not {"type", "name"} <= set(result.get("dataset", {})):
                errors.append('"model-index[0].results[0]" needs task.type, dataset.type and dataset.name')
            if not all(metric.get("type") and "value" in metric for metric in result.get("metrics", [{}])):
                errors.append('"model-index[0].results[0].metrics[0]" needs type and value')
    return errors


def _send(request: BaseHTTPRequestHandler, status: int, answer: Any, code: str = "") -> None:
    error = {"X-Error-Code": code, "X-Error-Message": answer["error"]} if code else {}
    send(request, status, json.dumps(answer).encode(), {"Content-Type": "application/json", **error})


def _sha(repository: Repository, branch: str) -> str:
    return hashlib.sha1(json.dumps(repository.branches[branch], sort_keys=True).encode()).hexdigest()


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
