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
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard
from small_http import SmallHTTP, body_of, send

TOKENS = {"hf_of_ada_0123456789": "write", "hf_reader_0123456789": "read"}  # both are ada's
SHA = "0" * 40  # of every commit


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})  # name -> path -> content
    commits: int = 0


class HubServer(SmallHTTP):
    protocol = "HTTP/1.1"

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        super().__init__()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        role = TOKENS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        status, value = self.answer(unquote(urlsplit(request.path).path), role, body_of(request))
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        headers = {"X-Repo-Commit": SHA, "ETag": f'"{git_hash(content)}"', "Content-Type": "application/json"}
        send(request, status, content, headers | ({"X-Error-Code": value["error"]} if status == 404 else {}))

    def answer(self, path: str, role: str | None, body: bytes) -> tuple[int, object]:
        """Return the status and the content: bytes, or what becomes JSON."""
        words = path.removeprefix("/api/models").split("/")[1:]
        name = "/".join(words[:2])
        repository = self.repositories.get(name)
        match words:
            case ["api", "whoami-v2"]:
                auth = {"accessToken": {"role": role}}
                return 200 if role else 401, {"name": "ada", "orgs": [{"name": "lovelace"}], "auth": auth}
            case ["api", "validate-yaml"]:
                errors = [{"message": error} for error in card_errors(json.loads(body)["content"])]
                return 400 if errors else 200, {"errors": errors, "warnings": []}
            case ["api", "repos", "create"]:
                asked = {"organization": "ada"} | json.loads(body)
                name = "{organization}/{name}".format_map(asked)
                if asked["organization"] == "babbage":
                    return 403, {"error": "You don't have the rights to create a model there"}
                made = Repository(asked.get("visibility") == "private")
                return 200 if self.repositories.setdefault(name, made) is made else 409, {"url": f"{self.url}/{name}"}
            case _ if repository is None:
                return 404, {"error": "RepoNotFound"}
            case [_, _, "branch", branch]:
                repository.branches[branch] = dict(repository.branches["main"])
                return 200, {}
            case [_, _, "preupload", branch]:
                oids = {path: git_hash(content) for path, content in repository.branches[branch].items()}
                regular = {"uploadMode": "regular", "shouldIgnore": False}
                asked = [file["path"] for file in json.loads(body)["files"]]
                return 200, {"files": [{"path": path, "oid": oids.get(path), **regular} for path in asked]}
            case [_, _, "commit", branch]:
                files = [json.loads(line)["value"] for line in body.splitlines()[1:]]
                repository.branches[branch] |= {f["path"]: base64.b64decode(f["content"]) for f in files}
                repository.commits += 1
                return 200, {"commitUrl": f"{self.url}/{name}/commit/{SHA}", "commitOid": SHA, "success": True}
            case [_, _, "resolve", branch, *parts]:
                content = repository.branches[branch].get("/".join(parts))
                return (404, {"error": "EntryNotFound"}) if content is None else (200, content)
            case [_, _, *revision]:
                files = repository.branches[revision[1] if revision else "main"]
                card = ModelCard(files["README.md"].decode()).data.to_dict() if "README.md" in files else None
                siblings = [{"rfilename": path} for path in files]
                return 200, {"id": name, "private": repository.private, "siblings": siblings, "cardData": card}


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def card_errors(text: str) -> list[str]:
    """Return what the Hub refuses in a card's metadata. The model index is checked by `ModelCard`, which raises."""
    data = ModelCard(text).data.to_dict()
    named = [name for name in (data.get("base_model"), *data.get("datasets", [])) if name]
    errors = [f"{name} is not a name on the Hub" for name in named if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name)]
    if not re.fullmatch(r"[a-z0-9.-]+", data.get("license", "mit")):
        errors.append("license must be an identifier")
    return errors
