"""A worker's process: its name where it is given none, and its flags about adapters."""

import os
import socket
from pathlib import Path

import pytest

from headwater.actors.worker.lora import LoraSettings
from headwater.actors.worker.settings import LoraLoading
from headwater.engines.lora_cache import LoraError
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.setting import ConfigError
from headwater.ops.start.engine import adapters_of, rank_name, unique_name
from headwater.schemas.names import token
from tests.support.engines.adapters import make_adapter
from tests.support.processes.line import settings_of

REPLICAS = [f"headwater-worker-of-the-second-largest-model-6d8f7c9b5d-{end}" for end in ("abcde", "vwxyz")]


def test_two_containers_of_one_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(socket, "gethostname", lambda: "worker")
    names = {unique_name() for _ in range(50)}
    assert len(names) == 50
    assert all(name.startswith("worker-") for name in names)


@pytest.mark.parametrize("host", ["", "-", "__", "Größe.example", "a" * 63, *REPLICAS])
def test_any_host_name_makes_a_valid_name(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """A token, that of a rank too, and not one of the reserved names."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    name = unique_name()
    token("worker", rank_name(name, 255))
    assert not name.startswith("__")


def test_the_end_of_a_long_host_name_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells replicas apart for those who read it."""
    for host in REPLICAS:
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert host[-5:] in unique_name()


def test_without_sources_nothing_can_be_loaded() -> None:
    """The default, and it makes no folder."""
    assert adapters_of(EngineProcess(), "w") == LoraSettings()
    with pytest.raises(ConfigError, match="--lora-on-demand needs --lora-sources"):
        adapters_of(settings_of("engine", "--lora-on-demand"), "w")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--lora-sources", "adapters"), "absolute path"),
        (("--lora-sources", "/a, ftp://host"), "ftp://host"),
        (("--lora-sources", "https://me:secret@host"), "name or password"),
        (("--lora-networks", "10.0.0.1/8"), "10.0.0.0/8"),
    ],
)
def test_what_can_not_be_used_is_named(flags: tuple[str, str], why: str) -> None:
    """Before the worker starts."""
    with pytest.raises(ConfigError, match=f"--lora-sources, --lora-networks: .*{why}"):
        adapters_of(settings_of("engine", *flags), "w")


async def test_flags_become_limits(tmp_path: Path) -> None:
    """Each where it counts."""
    settings = settings_of(
        *("engine", "--namespace", "ns", "--cache-dir", str(tmp_path / "cache")),
        *("--lora-sources", f"{tmp_path / 'a'}, hf://org", "--lora-on-demand", "--no-lora-check-base"),
        *("--lora-max-mib", "3", "--lora-cache-mib", "5"),
        *("--drain-timeout", "11"),
    )
    made = adapters_of(settings, "w")
    assert (made.loading, made.unload_s) == (LoraLoading(True, False), 11.0)
    assert made.files is not None
    policy = made.files.policy
    assert (policy.bytes_max, policy.cache_bytes_max) == (3 << 20, 5 << 20)
    found = await made.files.fetch(str(make_adapter(tmp_path / "a" / "one")))
    assert found.folder == tmp_path / "cache" / "adapters" / found.digest
    with pytest.raises(LoraError, match="--lora-sources"):
        await made.files.fetch(str(tmp_path))
    made.restart_list.write_names(("x",))
    assert adapters_of(settings, "w").restart_list.read_names() == ("x",)
    assert adapters_of(settings, "v").restart_list.read_names() == ()
    made.files.close()


async def test_without_a_cache_adapters_are_kept_for_now(tmp_path: Path) -> None:
    """In the machine's temporary folder, and nothing is recalled."""
    made = adapters_of(settings_of("engine", "--cache-dir", "none", "--lora-sources", str(tmp_path)), "w")
    assert made.files is not None
    found = await made.files.fetch(str(make_adapter(tmp_path / "one")))
    assert found.folder.is_dir()
    made.restart_list.write_names(("x",))
    assert made.restart_list.read_names() == ()
    made.files.close()
