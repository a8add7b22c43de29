"""Each mistake that can be seen before loading: the message names the flag and the mend."""

import re
from typing import Any

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.engines.launcher import PortRange
from headwater.engines.vllm import config
from headwater.engines.vllm import config as vllm_config
from headwater.schemas.names import pool_name
from headwater.schemas.tables import ModelCard


def card(model: str = "m", block_size: int = 32, version: str = "0.32.0", engine: str = "vllm") -> ModelCard:
    """A pool's card."""
    return ModelCard(
        name=model,
        pool=pool_name(model, block_size),
        block_size=block_size,
        context_length=1024,
        tokenizer="",
        chat_template="",
        special_tokens={},
        eos_token_ids=(),
        engine=engine,
        capabilities=(),
        created_s=0,
        engine_version=version,
    )


@pytest.mark.parametrize(
    ("role", "connector", "words", "wanted"),
    [
        ("both", "", (), ()),
        ("both", "offload", (), ("offload",)),
        ("prefill", "", (), ("nixl",)),
        ("decode", "", (), ("nixl",)),
        ("decode", "nixl,offload", (), ("nixl", "offload")),
        ("prefill", "", ("--kv-transfer-config", '{"kv_connector": "NixlConnector"}'), ()),
        (
            "decode",
            "",
            (
                "--kv-transfer-config",
                '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}]}}',
            ),
            (),
        ),
        (
            "prefill",
            "",
            ("--kv-transfer-config", '{"kv_connector": "Own", "kv_connector_module_path": "own.connector"}'),
            (),
        ),
        ("both", "", ("--headless",), ()),
    ],
)
def test_a_role_chooses_its_connector(
    role: Any, connector: str, words: tuple[str, ...], wanted: tuple[str, ...]
) -> None:
    """NIXL where nothing was said; what was said otherwise."""
    assert config.role(role, connector, words) == wanted


@pytest.mark.parametrize(
    ("role", "connector", "words", "wanted"),
    [
        ("prefill", "offload", (), "--role prefill with --connector offload: .*add one of nixl"),
        ("decode", "none", (), "--role decode with --connector none: .*omit --connector"),
        ("decode", "", ("--headless",), "--role decode with --headless: .*leader"),
        ("prefill", "", ("--node-rank", "1"), "--role prefill with --node-rank 1: .*leader"),
        (
            "both",
            "nixl",
            ("--kv_transfer_config={}",),
            "--connector nixl and --kv-transfer-config .*use one of them",
        ),
        ("both", "nixl", ("--kv-transfer-config.kv_connector", "X"), "use one of them"),
        (
            "prefill",
            "",
            ("--kv-transfer-config", '{"kv_connector": "OffloadingConnector"}'),
            "do not hand KV over",
        ),
        ("decode", "", ("--kv-transfer-config", "{}"), "do not hand KV over"),
    ],
)
def test_roles_and_connectors_that_exclude_each_other(
    role: Any, connector: str, words: tuple[str, ...], wanted: str
) -> None:
    """Named, with the way out."""
    with pytest.raises(EngineUnavailable, match=wanted):
        config.role(role, connector, words)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--headless",), "--headless"),
        (("--node-rank", "2"), "--node-rank 2"),
        (("--node-rank=0",), ""),
        ((), ""),
    ],
)
def test_who_takes_no_requests(words: tuple[str, ...], wanted: str) -> None:
    """Headless ranks and later nodes."""
    assert config.is_follower(words) == wanted


def test_kv_event_ports_come_from_tcp_endpoints() -> None:
    """One per rank; other sockets need none; a missing number is told."""
    flag = "--kv-events-config"
    assert config.kv_event_ports("a", "tcp://*:5557", 2, flag) == [PortRange(flag, "a", 5557, 2)]
    assert config.kv_event_ports("a", "ipc:///tmp/x", 2, flag) == []
    with pytest.raises(EngineUnavailable, match=r"--kv-events-config: tcp://\* has no port number"):
        config.kv_event_ports("a", "tcp://*", 1, flag)


def test_mixed_versions_of_a_pair_are_refused() -> None:
    """Both versions and both ways out; workers without a role, and by permission, are not held back."""
    cards, live = [card(version="0.31.1")], {"m-b32"}
    with pytest.raises(EngineUnavailable) as caught:
        config.versions("decode", "0.32.0", "m", cards, live, allow=False)
    for text in (
        "--role decode",
        "vLLM 0.32.0 here, 0.31.1 in pool m-b32",
        "vllm==0.31.1",
        "--allow mixed-versions",
    ):
        assert text in str(caught.value)
    config.versions("decode", "0.32.0", "m", cards, live, allow=True)
    config.versions("both", "0.32.0", "m", cards, live, allow=False)
    config.versions("decode", "0.31.1", "m", cards, live, allow=False)
    config.versions("decode", "0.32.0", "m", cards, set(), allow=False)
    config.versions("decode", "0.32.0", "m", [card(version="")], live, allow=False)


@pytest.mark.parametrize("version", ["0.8.4", "0.11.0", "0.13.9", "0.10.1+cpu"])
def test_a_vllm_with_known_holes_is_refused(version: str) -> None:
    """With the hole and the release that mends it, unless one insists."""
    with pytest.raises(
        EngineUnavailable,
        match=rf"vLLM {re.escape(version)} .*CVE-.*0\.14\.0 or newer.*--allow vulnerable",
    ):
        vllm_config.RELEASES.check(version, allow=False)
    vllm_config.RELEASES.check(version, allow=True)


@pytest.mark.parametrize(
    "version", ["0.14.0", "0.14.0rc2.dev3+gabc", "0.24.0", "0.32.0", "1.0", "0.0.0", "dev"]
)
def test_later_ones_and_builds_from_source_start(version: str) -> None:
    """What is left open there is closed by the edge."""
    vllm_config.RELEASES.check(version, allow=False)
