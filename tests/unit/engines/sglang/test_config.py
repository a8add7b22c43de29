"""SGLang's arguments, releases and capabilities: without SGLang."""

import json
from typing import Any

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.engines.launcher import launcher_of
from headwater.engines.native_arguments import number
from headwater.engines.sglang import (
    SglangOptions,
    signatures,
)
from headwater.engines.sglang import (
    config as sglang_config,
)
from headwater.engines.sglang.config import POSSIBLE, SglangSettings, capabilities, keyword_arguments
from headwater.engines.sglang.signatures import LACKS, USED, Signatures
from tests.support.engines.settings import engine_settings, with_fields

SETTINGS = engine_settings(SglangOptions(), "/m")


def made(settings: SglangSettings = SETTINGS, *, cpu: bool = False, **given: Any) -> dict[str, Any]:
    """All arguments of the engine."""
    return keyword_arguments(settings, given, "ipc://e", "ipc://r", cpu=cpu)


def test_defaults_that_the_adapter_relies_on() -> None:
    """New tokens only, nothing cut off, pages of several tokens, events on our sockets."""
    found = made()
    assert found["incremental_streaming_output"] is True
    assert found["allow_auto_truncate"] is False
    assert (found["page_size"], found["model_path"]) == (16, "/m")
    assert json.loads(found["kv_events_config"])["endpoint"] == "ipc://e"
    assert "device" not in found
    assert made(cpu=True)["page_size"] == 32
    assert made(cpu=True)["attention_backend"] == "torch_native"


def test_embeddings_may_share_a_batch_with_pixels() -> None:
    """Only where there are any; encode workers have neither role nor KV."""
    name = "enable_adaptive_dispatch_to_encoder"
    assert name not in made()
    assert made(with_fields(SETTINGS, reads_embeddings=True))[name] is True
    assert "disaggregation_mode" not in made(with_fields(SETTINGS, role="encode"))


def test_settings_and_native_arguments() -> None:
    """The user's are stronger than ours, and contradictions are errors."""
    own = with_fields(
        SETTINGS, block_size=64, max_model_len=2048, exports_metrics=True, logits_processors={"a": "m:A"}
    )
    found = made(own, cpu=True, dtype="bfloat16")
    assert (found["page_size"], found["context_length"]) == (64, 2048)
    assert (found["enable_metrics"], found["enable_custom_logit_processor"]) == (True, True)
    assert found["dtype"] == "bfloat16"
    assert made(own, page_size=64)["page_size"] == 64
    with pytest.raises(EngineUnavailable, match=r"--block-size 64 .*--page-size 32 disagree"):
        made(own, page_size=32)


def test_arguments_that_follow_from_others() -> None:
    """Low priorities first, as in the API; weights that come back from sleep as they were."""
    assert "schedule_low_priority_values_first" not in made()
    assert made(enable_priority_scheduling=True)["schedule_low_priority_values_first"] is True
    assert made(enable_memory_saver=True)["enable_weights_cpu_backup"] is True
    assert (
        made(enable_memory_saver=True, enable_weights_cpu_backup=False)["enable_weights_cpu_backup"] is False
    )


@pytest.mark.parametrize("name", sorted(sglang_config.OWNED))
def test_arguments_that_the_adapter_owns_are_rejected(name: str) -> None:
    """With the reason."""
    with pytest.raises(EngineUnavailable, match=f"--{name.replace('_', '-')} is not supported here"):
        keyword_arguments(SETTINGS, {name: 1}, "ipc://e", "ipc://r", cpu=False)


def test_native_kv_events() -> None:
    """Where they are published, sockets that are missing are ours."""
    found = json.loads(
        made(kv_events_config='{"publisher": "zmq", "endpoint": "tcp://*:9"}')["kv_events_config"]
    )
    assert (found["endpoint"], found["replay_endpoint"]) == ("tcp://*:9", "ipc://r")
    for wrong, message in (
        ("{", "Give a JSON object"),
        ('{"publisher": "null"}', "disables KV events"),
        ("[]", "disables"),
    ):
        with pytest.raises(EngineUnavailable, match=message):
            made(kv_events_config=wrong)


def test_arguments_are_found_in_all_spellings() -> None:
    """Without SGLang."""
    for words in (("--tp-size", "2"), ("--tp-size=2",), ("--tensor-parallel-size", "2")):
        assert number(words, "tensor_parallel_size", 1) == 2
    assert number((), "tensor_parallel_size", 1) == 1
    with pytest.raises(EngineUnavailable, match="use an integer"):
        number(("--dp-size", "x"), "data_parallel_size", 1)


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("0.5.9", True),
        ("0.5.9.post1", True),
        ("0.5.10", False),
        ("0.5.23", False),
        ("0.0.0", False),
        ("main", False),
    ],
)
def test_releases_with_known_holes_are_refused(version: str, refused: bool) -> None:
    """Unless that is allowed; builds without a release number are taken."""
    sglang_config.RELEASES.check(version, allow=True)
    if refused:
        with pytest.raises(EngineUnavailable, match=r"CVE-2026-3059.*install 0\.5\.10 .*--allow vulnerable"):
            sglang_config.RELEASES.check(version, allow=False)
    else:
        sglang_config.RELEASES.check(version, allow=False)


def test_a_recorded_release_lacks_what_was_recorded() -> None:
    """And nothing that it cannot do without."""
    for version, lacks in LACKS.items():
        found = signatures.of_release(version)
        for call, missing in lacks.items():
            assert not set(missing) & set(USED[call].required)
            assert not any(found.has(call, name) for name in missing)
    old = signatures.of_release("0.5.17")
    assert old.keep("GenerateReqInput", {"cache_salt": "s", "rid": "r"}) == {"rid": "r"}
    assert signatures.of_release("0.5.23").keep("GenerateReqInput", {"cache_salt": "s"}) == {
        "cache_salt": "s"
    }


def test_an_unknown_release_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is left out, unless nothing works without it: that is named."""
    lacks = {"GenerateReqInput": ("priority",), "EmbeddingReqInput": ()}
    monkeypatch.setattr(signatures, "inspected", lambda: lacks)
    assert not signatures.of_release("9.9.9").has("GenerateReqInput", "priority")
    lacks["GenerateReqInput"] = ("input_ids",)
    with pytest.raises(
        EngineUnavailable, match=r"SGLang 9\.9\.9 has no 'input_ids' in GenerateReqInput.*sglang==0\.5\.23"
    ):
        signatures.of_release("9.9.9")


OF_THE_MODEL = {"images", "videos", "audio", "image_embeddings", "transcription", "allowed_tokens"}


def test_capabilities_follow_the_configuration() -> None:
    """And the release: adapters and salts count only if its events name them."""
    everything = {
        "grammar_backend": "xgrammar",
        "enable_deterministic_inference": True,
        "enable_strict_thinking": True,
        "enable_priority_scheduling": True,
        "enable_lora": True,
        "enable_memory_saver": True,
    }

    def of(config: dict[str, Any], lacks: Any = None, generates: bool = True) -> set[str]:
        known = Signatures(lacks or {})
        found = set(capabilities(config, generates=generates, processors={"a": "m:A"}, signatures=known))
        # The model decides about these.
        assert not found & OF_THE_MODEL
        return found | OF_THE_MODEL

    whole = POSSIBLE - {"encode", "embed", "handoff", "split_only"}
    assert of(everything) == whole
    assert of(everything, LACKS["0.5.19"]) == whole - {"lora", "cache_salt"}
    assert of({**everything, "dp_size": 2}) == whole - {"lora"}
    assert of({**everything, "skip_tokenizer_init": True}) == whole - {"guide"}
    assert of({**everything, "speculative_algorithm": "EAGLE"}) == whole - {"logit_bias", "processors"}
    assert of({**everything, "disaggregation_mode": "decode"}) == whole | {"handoff", "split_only"}
    assert of({"disable_radix_cache": True}, generates=False) == {"embed", "pause", "profile", *OF_THE_MODEL}
    assert not of({}) & {"seed", "guide", "lora", "sleep", "priority", "thinking_budget"}


def test_nodes_of_one_engine() -> None:
    """The first one is the worker; what several cannot do is named."""
    first, second = (
        ("--nnodes", "2", "--node-rank=0"),
        ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "h:1"),
    )
    for words, leader in ((("--nnodes", "2"), None), (first, None), (second, "h:1")):
        follower = launcher_of("sglang", SglangOptions(words)).follower()
        assert (follower and follower.leader) == leader
    nodes: dict[str, Any] = {"nnodes": 2, "dist_init_addr": "h:1"}
    assert made(**nodes, node_rank=1)["node_rank"] == 1
    with pytest.raises(EngineUnavailable, match="--nnodes 2 without --dist-init-addr"):
        made(nnodes=2)
    with pytest.raises(EngineUnavailable, match="--dp-size 2 with --nnodes 2 is not implemented"):
        made(**nodes, dp_size=2)
    with pytest.raises(EngineUnavailable, match="--role prefill with --nnodes 2 is not implemented"):
        made(with_fields(SETTINGS, role="prefill"), **nodes)
