"""How a worker's flags about adapters become its settings."""

from pathlib import Path

import pytest

from headwater.actors.adapters import AdapterSettings
from headwater.engines.adapter_files import AdapterError
from headwater.ops.adapters import settings_of
from headwater.ops.config import ConfigError, Settings
from tests.support.adapters import make_adapter


def test_without_sources_nothing_can_be_loaded() -> None:
    """The default, and it makes no folder."""
    assert settings_of(Settings(), "w") == AdapterSettings()
    with pytest.raises(ConfigError, match="--lora-on-demand yes needs --lora-sources"):
        settings_of(Settings(lora_on_demand="yes"), "w")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"lora_sources": "adapters"}, "whole path"),
        ({"lora_sources": "/a, ftp://host"}, "ftp://host"),
        ({"lora_sources": "https://me:secret@host"}, "name or password"),
        ({"lora_networks": "10.0.0.1/8"}, "10.0.0.0/8"),
    ],
)
def test_what_can_not_be_used_is_named(flags: dict[str, str], why: str) -> None:
    """Before the worker starts."""
    with pytest.raises(ConfigError, match=f"--lora-sources, --lora-networks: .*{why}"):
        settings_of(Settings(**flags), "w")  # type: ignore[arg-type]


async def test_flags_become_limits(tmp_path: Path) -> None:
    """Each where it counts."""
    settings = Settings(
        namespace="ns",
        cache_dir=str(tmp_path / "cache"),
        lora_sources=f"{tmp_path / 'a'}, hf://org",
        lora_on_demand="yes",
        lora_check_base="no",
        lora_max_mib=3,
        lora_cache_mib=5,
        lora_fetch_s=7.5,
        lora_load_s=9.5,
        drain_s=11.0,
    )
    made = settings_of(settings, "w")
    assert (made.on_demand, made.check_base, made.load_s, made.unload_s) == (True, False, 9.5, 11.0)
    assert made.files is not None
    policy = made.files.policy
    assert (policy.bytes_max, policy.cache_bytes_max, policy.fetch_s) == (3 << 20, 5 << 20, 7.5)
    found = await made.files.fetch(str(make_adapter(tmp_path / "a" / "one")))
    assert found.folder == tmp_path / "cache" / "adapters" / found.digest
    with pytest.raises(AdapterError, match="--lora-sources"):
        await made.files.fetch(str(tmp_path))
    made.memory.keep(("x",))
    assert settings_of(settings, "w").memory.recall() == ("x",)
    assert settings_of(settings, "v").memory.recall() == ()
    made.files.close()


async def test_without_a_cache_adapters_are_kept_for_now(tmp_path: Path) -> None:
    """In the machine's temporary folder, and nothing is recalled."""
    made = settings_of(Settings(cache_dir="none", lora_sources=str(tmp_path)), "w")
    assert made.files is not None
    found = await made.files.fetch(str(make_adapter(tmp_path / "one")))
    assert found.folder.is_dir()
    made.memory.keep(("x",))
    assert made.memory.recall() == ()
    made.files.close()
