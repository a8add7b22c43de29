"""A hub of models on loopback: the part of its HTTP protocol that its library uses, with faults that a test switches on."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

_RESOLVE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_API = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<revision>[^/?]+)")


class Hub:
    """Repositories by name. Files with an ending of weights are large ones (LFS), the others lie in Git."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, dict[str, str]] = {}
        self.gated: set[str] = set()
        """Repositories that need the token `granted`."""
        self.breaks: Counter[str] = Counter()
        """How often a file's body ends in its middle."""
        self.corrupt: Counter[str] = Counter()
        """How often a file's body has other bytes than announced."""
        self.sizes: dict[str, int] = {}
        """Announced sizes that are not those of the contents."""
        self.down = False
        """Does every request fail with 503?"""
        self.held: dict[str, threading.Event] = {}
        """Files of which the first half is sent, and the rest when the event is set."""
        self.reached: dict[str, threading.Event] = {}
        """Set when the first half of a held file is sent."""
        self.served: Counter[str] = Counter()
        """Bodies that were begun, by file."""
        self.ranges: list[str] = []

    def publish(self, repository: str, folder: Path, *, revision: str = "main") -> str:
        """Put a folder's files into a repository; returns the commit."""
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        commit = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()
        self.files[commit] = files
        self.commits.setdefault(repository, {}).update({revision: commit, commit: commit})
        return commit

    def hold(self, file: str) -> threading.Event:
        """Send only the first half of a file until the returned event is set."""
        self.held[file], self.reached[file] = threading.Event(), threading.Event()
        return self.held[file]


def _digest(name: str, data: bytes) -> str:
    if _is_large(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf", "tokenizer.json"))


def _entry(name: str, data: bytes, announced: int | None) -> dict[str, object]:
    size = len(data) if announced is None else announced
    entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": _digest(name, data)}
    if _is_large(name):
        entry["oid"] = "0" * 40
        entry["lfs"] = {"oid": _digest(name, data), "size": size, "pointerSize": 134}
    return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if self.hub.down:
            self._send(503, b"{}")
        elif match := _API.match(path):
            self._api(**match.groupdict())
        elif match := _RESOLVE.match(path):
            self._file(**match.groupdict())
        else:
            self._send(404, b"{}")

    do_HEAD = do_GET  # noqa: N815 -- so the standard library calls it

    def _commit(self, repository: str, revision: str) -> str:
        """The commit of a revision; "" after an error was sent."""
        if repository not in self.hub.commits:
            # As the real one: what is private and what is not there look alike.
            self._send(401, b"{}", {"x-error-code": "RepoNotFound", "x-error-message": "not found"})
            return ""
        if (
            repository in self.hub.gated
            and self.headers.get("authorization") != "Bearer granted"
            and not self.path.startswith("/api")
        ):
            self._send(
                403 if self.headers.get("authorization") else 401,
                b"{}",
                {
                    "x-error-code": "GatedRepo",
                    "x-error-message": f"Access to model {repository} is restricted.",
                },
            )
            return ""
        commit = self.hub.commits[repository].get(revision, "")
        if not commit:
            self._send(404, b"{}", {"x-error-code": "RevisionNotFound"})
        return commit

    def _api(self, repository: str, what: str, revision: str) -> None:
        commit = self._commit(repository, revision)
        if not commit:
            return
        files = self.hub.files[commit]
        if what == "tree":
            entries = [_entry(*item, self.hub.sizes.get(item[0])) for item in files.items()]
            self._send(200, json.dumps(entries).encode())
            return
        siblings = [{"rfilename": name} for name in files]
        document = {"_id": commit[:24], "id": repository, "sha": commit, "siblings": siblings}
        self._send(200, json.dumps(document).encode())

    def _file(self, repository: str, revision: str, file: str) -> None:
        commit = self._commit(repository, revision)
        if not commit:
            return
        data = self.hub.files[commit].get(file)
        if data is None:
            self._send(404, b"{}", {"x-error-code": "EntryNotFound"})
            return
        headers = {"etag": f'"{_digest(file, data)}"', "x-repo-commit": commit, "accept-ranges": "bytes"}
        if _is_large(file):
            headers |= {"x-linked-etag": headers["etag"], "x-linked-size": str(len(data))}
        start = 0
        asked = self.headers.get("range", "")
        if asked and self.command == "GET":
            self.hub.ranges.append(asked)
            start = int(asked.partition("=")[2].partition("-")[0])
            headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send_file(206 if start else 200, file, data[start:], headers)

    def _send_file(self, status: int, file: str, data: bytes, headers: dict[str, str]) -> None:
        hub = self.hub
        if self.command == "HEAD":
            self._send(status, data, headers)
            return
        hub.served[file] += 1
        half = len(data) // 2
        if hub.corrupt[file] > 0:
            hub.corrupt[file] -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        self._send(status, b"", headers, length=len(data))
        if hub.breaks[file] > 0:
            hub.breaks[file] -= 1
            self.wfile.write(data[:half])
            self.close_connection = True
            return
        if file in hub.held:
            self.wfile.write(data[:half])
            self.wfile.flush()
            hub.reached[file].set()
            hub.held[file].wait(60)
            data = data[half:]
        self.wfile.write(data)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            pass  # the client is gone


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub for the time of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    made = Hub(server.server_address[1])
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": made})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        for event in made.held.values():
            event.set()
        server.shutdown()
        thread.join()
        server.server_close()
