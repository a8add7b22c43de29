"""Models in buckets and on web servers: real clients against a server of this test."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.ops.start.model_source import fetch, parse_source
from tests.support.servers.files import FileServer, file_server
from tests.unit.ops.start.models.conftest import WEIGHTS

SERVED = {"config.json", "tokenizer.json", WEIGHTS}


STORES = ("s3", "gs", "az", "http")

ACCOUNT = "devstoreaccount1"
"""The account of Azure's emulators, which have it in their paths."""


@pytest.fixture
def web(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A server that has the model at /bucket/models/small, and is an endpoint of S3, of Google's and of Azure's storage too."""
    key = tmp_path / "key.json"
    with file_server() as made:
        for path in folder.rglob("*"):
            if path.is_file():
                for start in ("", f"/{ACCOUNT}"):
                    made.files[f"{start}/bucket/models/small/{path.relative_to(folder)}"] = path.read_bytes()
        nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        key.write_text(json.dumps({"gcs_base_url": made.url, "disable_oauth": True, **nobody}))
        for name, value in {
            "GOOGLE_SERVICE_ACCOUNT": str(key),
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": made.url,
            "AWS_ENDPOINT": made.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "nowhere",
        }.items():
            monkeypatch.setenv(name, value)
        yield made


def at(web: FileServer, scheme: str, name: str = "small") -> str:
    """The URL of the model."""
    return f"{web.url}/bucket/models/{name}" if scheme == "http" else f"{scheme}://bucket/models/{name}"


def path_of(scheme: str, name: str) -> str:
    """The path of a file of the model at the server."""
    return f"{f'/{ACCOUNT}' if scheme == 'az' else ''}/bucket/models/small/{name}"


@pytest.mark.parametrize("scheme", STORES)
def test_a_folder_is_downloaded_once(web: FileServer, folder: Path, tmp_path: Path, scheme: str) -> None:
    """What breaks off is continued; a change at the source is another folder; without the source the last one serves."""
    source = parse_source(at(web, scheme))
    web.breaks[path_of(scheme, WEIGHTS)] = 1
    found = fetch(source, weights=True, cache=tmp_path)
    assert {path.name for path in found.iterdir()} >= SERVED
    assert (found / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert len(web.ranges) == 1
    assert fetch(source, weights=True, cache=tmp_path) == found
    web.files[path_of(scheme, "config.json")] += b" "
    changed = fetch(source, weights=True, cache=tmp_path)
    assert changed != found
    assert (changed / "config.json").read_bytes().endswith(b" ")
    assert not list(tmp_path.glob("models/.*.part"))
    for name in SERVED:
        web.answers[path_of(scheme, name)] = lambda: (403, {}, b"")
    if scheme == "http":
        assert fetch(source, weights=True, cache=tmp_path) == changed


@pytest.mark.parametrize("scheme", STORES)
def test_what_is_not_there_is_said_so(web: FileServer, tmp_path: Path, scheme: str) -> None:
    """Nothing, and a shard that the index names; without a cache folder there is no place for it."""
    with pytest.raises(EngineUnavailable, match=r"/none: there is no config\.json"):
        fetch(parse_source(at(web, scheme, "none")), weights=True, cache=tmp_path)
    with pytest.raises(EngineUnavailable, match="need a cache folder: give --cache-dir"):
        fetch(parse_source(at(web, scheme)), weights=True, cache=None)
    if scheme == "http":
        index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
        web.files["/bucket/models/small/model.safetensors.index.json"] = index
        with pytest.raises(EngineUnavailable, match=r"no model-00001-of-00002\.safetensors, which"):
            fetch(parse_source(at(web, scheme)), weights=True, cache=tmp_path)


def test_settings_that_a_cloud_lacks_are_said(
    web: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a line, and not in a traceback."""
    monkeypatch.delenv("AZURE_STORAGE_USE_EMULATOR")
    with pytest.raises(EngineUnavailable, match=r"Account must be specified\. What was downloaded"):
        fetch(parse_source(at(web, "az")), weights=True, cache=tmp_path)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "none.json"))
    with pytest.raises(EngineUnavailable, match=r"Unable to open service account file from \S+/none\.json"):
        fetch(parse_source(at(web, "gs")), weights=True, cache=tmp_path)


def test_a_killed_download_is_continued(web: FileServer, folder: Path, tmp_path: Path) -> None:
    """By the next start, where it ended."""
    path = f"/bucket/models/small/{WEIGHTS}"
    half = len(web.files[path]) // 2
    # The library tries again for a while: the process is killed in that time.
    web.breaks[path] = 1_000
    program = (
        "import sys; from pathlib import Path; from headwater.ops.start.model_source import fetch, parse_source; "
        "fetch(parse_source(sys.argv[1]), weights=True, cache=Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, at(web, "http"), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not web.ranges:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    web.breaks.clear()
    web.ranges.clear()
    found = fetch(parse_source(at(web, "http")), weights=True, cache=tmp_path)
    assert (found / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert web.ranges in ([], [f"bytes={half}-"]) or web.ranges
