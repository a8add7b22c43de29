"""How a worker's flags about adapters become its settings."""

from pathlib import Path

import pytest

from headwater.actors.worker.lora import LoraSettings
from headwater.actors.worker.settings import LoraLoading
from headwater.engines.lora_cache import LoraError
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.setting import ConfigError
from headwater.ops.start.engine import adapters_of
from tests.support.engines.adapters import make_adapter
from tests.support.processes.line import settings_of


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
