"""A stand-in for the Hub, in a thread: the part of its HTTP API that `huggingface_hub` uses to push and to load back.

Users and their tokens, repositories with branches, the check of a card's metadata, commits, and downloads.
Every file is a regular one: the Hub, and not who pushes, chooses LFS.
"""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard
from small_http import SmallHTTP, body_of, send

TOKENS = {"hf_of_ada_0123456789": "write", "hf_reader_0123456789": "read"}  # both are ada's
ORGANISATION = "lovelace"  # ada belongs to it


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, dict[str, str]] = field(default_factory=lambda: {"main": {}})  # name -> path -> git's hash
    commits: list[list[str]] = field(default_factory=list)  # the paths of each

    def revision(self, name: str) -> tuple[str, dict[str, str]]:
        """Return the hash of a branch, and its files. A hash names its branch too."""
        hashes = {hashlib.sha1(repr(files).encode()).hexdigest(): files for files in self.branches.values()}
        return next((sha, files) for sha, files in hashes.items() if name == sha or files == self.branches.get(name))


class HubServer(SmallHTTP):
    protocol = "HTTP/1.1"

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # by git's hash
        self.bodies: list[bytes] = []  # of all requests
        super().__init__()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = body_of(request)
        self.bodies.append(body)
        path = unquote(urlsplit(request.path).path)
        role = TOKENS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if path == "/api/whoami-v2":
            details = {"type": "user", "name": "ada", "orgs": [{"name": ORGANISATION}]}
            details["auth"] = {"accessToken": {"role": role}}
            return answer(request, 200 if role else 401, details)
        if path == "/api/validate-yaml":
            errors = [{"message": error} for error in card_errors(json.loads(body)["content"])]
            return answer(request, 400 if errors else 200, {"errors": errors, "warnings": []})
        if path == "/api/repos/create":
            return self.create(request, json.loads(body))
        name, verb, others = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+)(?:/([^/]+)/?(.*))?", path).groups("")
        if name not in self.repositories:
            return answer(request, 404, {"error": "Repository not found"}, "RepoNotFound")
        repository = self.repositories[name]
        if verb == "branch":
            repository.branches[others] = repository.branches["main"]
            return answer(request, 200, {})
        if verb == "commit":
            return self.commit(request, name, others, [json.loads(line) for line in body.splitlines()])
        revision, _, path = others.partition("/")
        sha, files = repository.revision(revision or "main")
        if verb == "resolve" and path not in files:
            return answer(request, 404, {"error": "Entry not found"}, "EntryNotFound")
        if verb == "resolve":
            headers = {"X-Repo-Commit": sha, "ETag": f'"{files[path]}"'}
            return send(request, 200, self.objects[files[path]], headers)
        if verb == "preupload":
            asked = [file["path"] for file in json.loads(body)["files"]]
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            return answer(request, 200, {"files": [{"path": p, "oid": files.get(p), **regular} for p in asked]})
        card = ModelCard(self.objects[files["README.md"]].decode()).data.to_dict() if "README.md" in files else None
        siblings = [{"rfilename": path} for path in files]
        details = {"id": name, "sha": sha, "private": repository.private, "siblings": siblings, "cardData": card}
        return answer(request, 200, details)

    def create(self, request: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        owner = asked.get("organization") or "ada"
        name = f"{owner}/{asked['name']}"
        if owner not in ("ada", ORGANISATION):
            return answer(request, 403, {"error": f"You don't have the rights to create a model under {owner}"})
        if name in self.repositories:
            return answer(request, 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"})
        self.repositories[name] = Repository(asked.get("visibility") == "private" or bool(asked.get("private")))
        return answer(request, 200, {"url": f"{self.url}/{name}", "name": name})

    def commit(self, request: BaseHTTPRequestHandler, name: str, branch: str, lines: list[Any]) -> None:
        repository = self.repositories[name]
        files = dict(repository.branches[branch])
        for line in lines[1:]:
            content = base64.b64decode(line["value"]["content"])
            oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            self.objects[oid] = content
            files[line["value"]["path"]] = oid
        repository.branches[branch] = files
        repository.commits.append([line["value"]["path"] for line in lines[1:]])
        sha, _ = repository.revision(branch)
        return answer(request, 200, {"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha, "success": True})


def card_errors(text: str) -> list[str]:
    """Return what the Hub refuses in a card's metadata. The model index is checked by `ModelCard`, which raises."""
    data = ModelCard(text).data.to_dict()
    named = [name for name in (data.get("base_model"), *data.get("datasets", [])) if name]
    errors = [f"{name} is not a name on the Hub" for name in named if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name)]
    if not re.fullmatch(r"[a-z0-9.-]+", data.get("license", "mit")):
        errors.append("license must be an identifier")
    return errors


def answer(request: BaseHTTPRequestHandler, status: int, value: Any, code: str = "") -> None:
    error = {"X-Error-Code": code, "X-Error-Message": value["error"]} if code else {}
    send(request, status, json.dumps(value).encode(), {"Content-Type": "application/json", **error})
