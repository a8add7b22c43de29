"""A web server with files for tests, on loopback: as a plain one, as a bucket, and as a hub would answer."""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote

Answer = tuple[int, dict[str, str], bytes]


class FileServer:
    """`files` by path. `answers` are asked first: a path's own answer, such as a redirect."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.files: dict[str, bytes] = {}
        self.answers: dict[str, Callable[[], Answer]] = {}
        self.asked: list[str] = []
        self.ranges: list[str] = []
        self.breaks: Counter[str] = Counter()
        """How often the body of a path ends in its middle."""

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def answer(self, path: str) -> Answer:
        """What a GET of this path gets."""
        self.asked.append(path)
        if path in self.answers:
            return self.answers[path]()
        if path in self.files:
            data = self.files[path]
            etag = hashlib.sha256(data).hexdigest()
            return 200, {"etag": f'"{etag}"', "last-modified": "Sat, 21 Nov 2026 00:00:00 GMT"}, data
        return 404, {"x-error-code": "EntryNotFound"}, b"<Error><Code>NoSuchKey</Code></Error>"

    def listing(self, bucket: str, prefix: str) -> bytes:
        """The objects of a bucket as S3 lists them."""
        objects = "".join(
            f"<Contents><Key>{path.removeprefix(f'/{bucket}/')}</Key><Size>{len(data)}</Size>"
            f'<ETag>"{hashlib.sha256(data).hexdigest()}"</ETag><LastModified>2026-11-21T00:00:00Z</LastModified></Contents>'
            for path, data in sorted(self.files.items())
            if path.startswith(f"/{bucket}/{prefix}")
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{objects}</ListBucketResult>".encode()

    def azure_listing(self, container: str, prefix: str) -> bytes:
        """The blobs of a container as Azure lists them: their entity tags have no quotes here, though `GET` has them."""
        blobs = "".join(
            f"<Blob><Name>{path.removeprefix(f'{container}/')}</Name><Properties><Content-Type>text/plain</Content-Type><Content-Length>{len(data)}</Content-Length>"
            f"<Etag>{hashlib.sha256(data).hexdigest()}</Etag><Last-Modified>Sat, 21 Nov 2026 00:00:00 GMT</Last-Modified></Properties></Blob>"
            for path, data in sorted(self.files.items())
            if path.startswith(f"{container}/{prefix}")
        )
        return f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>".encode()

    def redirect(self, path: str, to: str) -> None:
        """Send those who ask for `path` elsewhere."""
        self.answers[path] = lambda: (302, {"location": to}, b"")


@contextmanager
def file_server() -> Iterator[FileServer]:
    """A server for the time of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            path = unquote(path)
            asked = dict(parse_qsl(query))
            if "list-type" in asked:
                headers: dict[str, str] = {}
                status, body = 200, made.listing(path.strip("/"), asked.get("prefix", ""))
            elif asked.get("comp") == "list":
                headers = {}
                status, body = 200, made.azure_listing(path, asked.get("prefix", ""))
            else:
                status, headers, body = made.answer(path)
            begin = self.headers.get("range", "") or self.headers.get("x-ms-range", "")
            if begin and status == 200 and self.command == "GET":
                made.ranges.append(begin)
                start, whole = int(begin.partition("=")[2].partition("-")[0]), len(body)
                status, body = 206, body[start:]
                headers = headers | {"content-range": f"bytes {start}-{whole - 1}/{whole}"}
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "x-commit" in made.answers and status == 200:
                self.send_header("x-repo-commit", "c" * 40)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command == "GET" and made.breaks[path] > 0:
                made.breaks[path] -= 1
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
            elif self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 -- so the standard library calls it

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = FileServer(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
