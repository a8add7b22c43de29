"""Models of a hub: its own library against a server that speaks its protocol."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
from huggingface_hub import constants

from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.worker import WorkerSettings
from headwater.ops.start import model_hub
from headwater.ops.start.model_source import DownloadFailed, fetch, parse_source, with_folder
from tests.support.servers.hub import Hub
from tests.unit.ops.start.models.conftest import WEIGHTS

SERVED = {"config.json", "tokenizer.json", WEIGHTS}


def download(model: str = "acme/small", revision: str = "", *, weights: bool = True) -> Path:
    """As the process that downloads does."""
    return model_hub.download(model, revision, weights=weights)


def fetch_apart() -> Path:
    """As a worker does, in a process."""
    return fetch(parse_source("acme/small"), weights=True, cache=None)


def files_of(folder: Path) -> set[str]:
    """Names below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def parts_of(cache: Path) -> list[Path]:
    """What is there of files that are not whole."""
    return list(cache.rglob("*.incomplete"))


def test_a_model_is_downloaded_once(server: Hub, folder: Path, cache: Path) -> None:
    """In one format; then it needs no body of a file, for a commit no request at all; a prompt's files need no weights."""
    commit = server.publish("acme/small", folder)
    assert files_of(download(weights=False)) == SERVED - {WEIGHTS}
    found = download()
    assert found == cache / "snapshots" / commit
    assert files_of(found) == SERVED
    assert (found / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert all(count == 1 for count in server.served.values())
    assert (cache / "refs" / "main").read_text() == commit
    assert download() == found
    server.down = True
    assert download("acme/small", commit) == found
    assert all(count == 1 for count in server.served.values())


def test_settings_get_the_folder_and_the_name(server: Hub, folder: Path, cache: Path) -> None:
    """Clients call it by the name that was typed; a branch is fixed to its commit for all processes of a fleet."""
    server.publish("acme/small", folder)
    (folder / "config.json").write_text("{}")
    commit = server.publish("acme/small", folder, revision="v2")
    worker = WorkerSettings(engine="sim", model="acme/small", model_revision="v2")
    found = with_folder(EngineProcess(worker=worker)).worker
    assert found.model == str(cache / "snapshots" / commit)
    assert (found.served_model_name, found.model_revision) == ("acme/small", "")
    named = with_folder(EngineProcess(worker=worker._replace(served_model_name="small"))).worker
    assert named.served_model_name == "small"
    assert with_folder(EngineProcess(worker=found)).worker == found


def test_a_connection_that_breaks_is_resumed(server: Hub, folder: Path, cache: Path) -> None:
    """What was received is not requested again."""
    # The library writes 10 MB at a time.
    (folder / WEIGHTS).write_bytes(bytes(24_000_000))
    server.publish("acme/small", folder)
    server.breaks[WEIGHTS] = 1
    found = download()
    assert (found / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert len(server.ranges) == 1
    assert not parts_of(cache)


@pytest.mark.parametrize("times", [1, 9])
def test_other_bytes_than_announced_are_not_kept(server: Hub, folder: Path, cache: Path, times: int) -> None:
    """They are downloaded once more; what is wrong again is an error that names both digests, and leaves nothing of the file."""
    server.publish("acme/small", folder)
    server.corrupt[WEIGHTS] = times
    if times == 1:
        assert (download() / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
        return
    with pytest.raises(DownloadFailed, match=r"model\.safetensors has the digest .* announced was"):
        download()
    assert not [path for path in cache.rglob("*") if path.stat().st_size > 100_000]
    server.corrupt.clear()
    assert (download() / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_small_files_are_verified_too(server: Hub, folder: Path) -> None:
    """Those that lie in Git itself, by Git's digest."""
    server.publish("acme/small", folder)
    server.corrupt["config.json"] = 9
    with pytest.raises(DownloadFailed, match=r"config\.json has the digest"):
        download()


def test_a_gated_model_needs_a_token(server: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says where to ask and whether a token was given; the token is never printed."""
    server.publish("acme/small", folder)
    server.gated.add("acme/small")
    with pytest.raises(DownloadFailed, match=rf"{server.url}/acme/small.*HF_TOKEN \(none is set\)"):
        download()
    monkeypatch.setenv("HF_TOKEN", "refused")
    with pytest.raises(DownloadFailed, match=r"HF_TOKEN \(one is set\)") as caught:
        download()
    assert "refused" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "granted")
    assert files_of(download()) == SERVED


def test_what_the_hub_does_not_have(server: Hub, folder: Path) -> None:
    """No such model, and no such revision of one."""
    with pytest.raises(DownloadFailed, match=r"no such folder, and .* has no such model, or it is private"):
        download("acme/nothing")
    server.publish("acme/small", folder)
    with pytest.raises(DownloadFailed, match="the hub has no revision v9 of it"):
        download("acme/small", "v9")


def test_without_a_network(
    server: Hub, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was downloaded serves, also while the hub fails; a part of it, or nothing, is an error that says so."""
    server.publish("acme/small", folder)
    download(weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadFailed, match="HF_HUB_OFFLINE is set, and only a part of main"):
        download()
    with pytest.raises(DownloadFailed, match=r"HF_HUB_OFFLINE is set, and .* does not have it at v2"):
        download("acme/small", "v2")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    found = download()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download() == found
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server.down = True
    assert download() == found
    assert "serving revision main as it was downloaded before" in capfd.readouterr().err


def test_a_cache_that_another_program_filled_serves(
    server: Hub, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's library alone, as engines use it, has put it there."""
    server.publish("acme/small", folder)
    program = "import huggingface_hub as h; h.snapshot_download('acme/small')"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    bodies = server.served.total()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert files_of(download()) >= SERVED
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    download()
    assert server.served.total() == bodies


def test_two_processes_at_once_download_once(
    server: Hub, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second waits for the first, and says so."""
    server.publish("acme/small", folder)
    go_on = server.hold(WEIGHTS)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(fetch_apart)
        assert server.reached[WEIGHTS].wait(30)
        second = pool.submit(fetch_apart)
        printed = ""
        while "waiting for another process" not in printed:
            printed += capfd.readouterr().err
            time.sleep(0.05)
        go_on.set()
        assert first.result(30) == second.result(30)
    assert set(server.served.values()) == {1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_a_download_at_once(
    server: Hub, folder: Path, cache: Path, number: signal.Signals
) -> None:
    """Nothing half is left of a file, whole ones stay, and the next start continues; a killed parent takes the download with it."""
    server.publish("acme/small", folder)
    server.hold(WEIGHTS)
    program = (
        "from headwater.ops.commands.application import main; import sys; sys.exit(main())",
        "engine",
        "vllm",
        "--model",
        "acme/small",
    )
    command = [sys.executable, "-c", *program]
    with subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.PIPE) as process:
        assert server.reached[WEIGHTS].wait(30)
        process.send_signal(number)
        code = process.wait(20)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert not parts_of(cache)
    server.held.pop(WEIGHTS).set()
    assert files_of(download()) == SERVED
    assert not parts_of(cache)
    assert server.served[WEIGHTS] == 2


OPENS: Final = """
import itertools, os, sys, threading, time
from headwater.ops.start import model_download as program
from headwater.ops.start import signals
signals.replace_handlers(program._stop)

def work(name):
    held = []
    for number in itertools.count():
        try:
            held.append(open(f"{sys.argv[1]}/{name}-{number}.incomplete", "ab"))
        except OSError:
            continue
        if len(held) > 5:
            os.unlink(held[0].name)
            held.pop(0).close()

for name in "ab":
    threading.Thread(target=work, args=(name,), daemon=True).start()
print("open", flush=True)
while True:
    time.sleep(1)
"""


def test_no_thread_opens_a_file_once_the_download_is_stopped(tmp_path: Path) -> None:
    """One that was about to would leave it half."""
    with subprocess.Popen([sys.executable, "-c", OPENS, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_said_first(server: Hub, folder: Path) -> None:
    """Before a byte of a file is requested."""
    server.publish("acme/small", folder)
    server.sizes[WEIGHTS] = 1 << 60
    with pytest.raises(DownloadFailed, match=r"1152921504\.\d GB are to be downloaded, and .* has room for"):
        download()
    assert not server.served
