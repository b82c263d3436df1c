"""A stand-in for the Hub: the endpoints that a push to a dataset repository uses, over real HTTP.

Repositories, tree listing, card check, preupload, the LFS batch and upload, commits. Not here: Xet,
multipart uploads, branches and rights other than one token.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_test"


class Hub:
    """The server's state; files: path -> its bytes; lfs: which paths are large files."""

    def __init__(self) -> None:
        self.repos: set[str] = set()
        self.private: set[str] = set()
        self.files: dict[str, bytes] = {}
        self.lfs: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []  # sha256 of each PUT that arrived
        self.commits: list[tuple[str, list[str]]] = []
        self.on_upload: Callable[[int], int] = lambda count: 200  # the status of the n-th PUT
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of a request."""
        if method == "PUT":
            return self._upload(path, body)
        sent = json.loads(body) if body and not path.endswith("/commit/main") else {}
        if path == "/api/repos/create":
            name = f"{sent['organization']}/{sent['name']}" if "organization" in sent else "?"
            assert sent["type"] == "dataset"
            if name in self.repos:
                return 409, {"error": "exists", "url": f"{self.url}/datasets/{name}"}
            self.repos.add(name)
            if sent.get("visibility") == "private":
                self.private.add(name)
            self.files[".gitattributes"] = b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"
            return 200, {"url": f"{self.url}/datasets/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        repo = re.match(r"/(?:api/)?datasets/([^/]+/[^/]+?)(?:\.git)?/", path)
        if repo is None or repo[1] not in self.repos:
            return 404, {"error": "no such repository"}
        if "/tree/main" in path:
            return 200, [self._entry(name) for name in sorted(self.files)]
        if path.endswith("/preupload/main"):
            return 200, {"files": [self._mode(file) for file in sent["files"]]}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._action(o) for o in sent["objects"]]}
        if path.endswith("/commit/main"):
            return self._commit(repo[1], body)
        return 404, {"error": f"not spoken here: {method} {path}"}

    def _entry(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        entry = {"type": "file", "path": name, "size": len(data), "oid": git_hash(data)}
        if name in self.lfs:
            oid = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 134}
        return entry

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        large = file["path"].endswith(".parquet")
        return {
            "path": file["path"],
            "uploadMode": "lfs" if large else "regular",
            "shouldIgnore": False,
            "oid": None,
        }

    def _action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.objects:
            return wanted
        return {**wanted, "actions": {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}}

    def _upload(self, path: str, body: bytes) -> tuple[int, Any]:
        status = self.on_upload(len(self.uploads) + 1)
        if status != 200:
            return status, {"error": "refused by the test"}
        oid = path.rsplit("/", 1)[1]
        self.uploads.append(oid)
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "not what was announced"}
        self.objects[oid] = body
        return 200, {}

    def _commit(self, repo: str, body: bytes) -> tuple[int, Any]:
        lines = [json.loads(line) for line in body.splitlines()]
        names = []
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                if value["oid"] not in self.objects:
                    return 400, {"error": f"{value['path']}: its object is not here"}
                self.files[value["path"]] = self.objects[value["oid"]]
                self.lfs.add(value["path"])
            else:
                assert line["key"] == "file"
                self.files[value["path"]] = base64.b64decode(value["content"])
            names.append(value["path"])
        self.commits.append((lines[0]["value"]["summary"], names))
        oid = f"{len(self.commits):040x}"
        return 200, {
            "commitUrl": f"{self.url}/datasets/{repo}/commit/{oid}",
            "commitOid": oid,
            "success": True,
        }


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def _do(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}" or self.command == "PUT"
        path = self.path.split("?")[0]
        status, value = (
            self.hub.answer(self.command, path, body)
            if allowed
            else (401, {"error": "who are you?"})
        )
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _do

    def log_message(self, *_: Any) -> None: ...
