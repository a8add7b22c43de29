"""Connectors by short names become vLLM's transfer configuration."""

from typing import Any

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.engines.vllm.handoff import CONNECTORS, hands_over, names, transfer_config

OFFLOAD = {"offload": {"cpu_bytes_to_use": 1 << 30}}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", ()), ("none", ()), ("nixl", ("nixl",)), (" nixl , offload ,", ("nixl", "offload"))],
)
def test_a_list_is_read_in_order(text: str, wanted: tuple[str, ...]) -> None:
    """Blanks and a last comma are nothing; `none` is none."""
    assert names(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("nixel", "--connector nixel: unknown; known are nixl"),
        ("nixl,none", "none together with others"),
        ("nixl,nixl", "each connector once"),
    ],
)
def test_a_wrong_list_is_named(text: str, wanted: str) -> None:
    """With the flag and what to do."""
    with pytest.raises(EngineUnavailable, match=wanted):
        names(text)


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("nixl", {}, {"kv_connector": "NixlConnector"}),
        ("lmcache", {}, {"kv_connector": "LMCacheConnectorV1"}),
        ("simple-offload", {}, {"kv_connector": "SimpleCPUOffloadConnector"}),
        (
            "kvbm",
            {},
            {
                "kv_connector": "DynamoConnector",
                "kv_connector_module_path": "kvbm.vllm_integration.connector",
            },
        ),
        (
            "offload",
            {"cpu_bytes_to_use": 5, "eviction_policy": "arc"},
            {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {
                    "self_describing_kv_events": True,
                    "cpu_bytes_to_use": 5,
                    "eviction_policy": "arc",
                },
            },
        ),
        (
            "example",
            {"shared_storage_path": "/kv", "kv_load_failure_policy": "recompute"},
            {
                "kv_connector": "ExampleConnector",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"shared_storage_path": "/kv"},
            },
        ),
    ],
)
def test_one_connector_is_itself(name: str, options: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Options of KVTransferConfig's go there, the connector's own into its extra configuration."""
    assert transfer_config((name,), {name: options}, cpu=False) == {"kv_role": "kv_both", **wanted}


def test_several_are_a_multi_connector_in_order() -> None:
    """The first is asked first."""
    config = transfer_config(("offload", "nixl"), OFFLOAD | {"nixl": {"num_threads": 8}}, cpu=True)
    assert config == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_buffer_device": "cpu",
                    "kv_connector_extra_config": {
                        "self_describing_kv_events": True,
                        "cpu_bytes_to_use": 1 << 30,
                    },
                },
                {
                    "kv_connector": "NixlConnector",
                    "kv_role": "kv_both",
                    "kv_buffer_device": "cpu",
                    "kv_connector_extra_config": {"num_threads": 8},
                },
            ]
        },
    }


def test_none_is_no_configuration() -> None:
    """Nothing to hand to vLLM."""
    assert transfer_config((), {}, cpu=True) is None


def test_options_must_be_for_somebody() -> None:
    """A misspelt or forgotten connector is named."""
    with pytest.raises(EngineUnavailable, match="--connector-options has options for offload"):
        transfer_config(("nixl",), OFFLOAD, cpu=False)


@pytest.mark.parametrize("name", [name for name, entry in CONNECTORS.items() if entry.needs])
def test_what_a_connector_needs_is_asked_for(name: str) -> None:
    """With both ways to give it."""
    option = CONNECTORS[name].needs[0][0]
    with pytest.raises(
        EngineUnavailable, match=rf"--connector {name} requires {option}.*\[connector_options\.{name}\]"
    ):
        transfer_config((name,), {}, cpu=False)


def test_only_some_hand_over() -> None:
    """Between prefill and decode."""
    assert hands_over(("offload", "nixl"))
    assert not hands_over(("offload", "example"))
