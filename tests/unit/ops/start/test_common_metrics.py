"""Metrics of engines under the names that all of them share."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from headwater.engines import registry, traits
from headwater.ops.start.metrics import common_families, common_names, zero_counters

TABLES = {name: traits.metrics for name, traits in registry.all_traits().items() if traits.metrics}
COMMON = {one.name for one in traits.COMMON_METRICS}


@pytest.mark.parametrize("engine", TABLES)
def test_a_table_names_each_common_metric_once(engine: str) -> None:
    names = list(TABLES[engine].values())
    assert len(names) == len(set(names))
    # TensorRT-LLM counts no preemptions.
    assert COMMON - set(names) == ({"preemptions"} if engine == "tensorrt_llm" else set())


def test_the_tables_are_of_the_engines_that_generate() -> None:
    assert set(TABLES) == {"sim", "vllm", "sglang", "tensorrt_llm"}
    assert len(common_names()) == sum(len(table) for table in TABLES.values()), "two engines share a name"


def test_vllm_has_the_metrics_of_its_table() -> None:
    """The release that is installed, in its source: its metrics need an engine."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    assert not {name for name in TABLES["vllm"] if f'name="{name}"' not in source}


def test_labels_of_the_engine_are_added_up() -> None:
    """Of a worker, by rank: an engine's own labels differ from engine to engine, and a reason is not everybody's."""
    own = CollectorRegistry()
    labels = ("worker", "pool", "role", "rank", "model_name", "finished_reason")
    tokens = Counter("trtllm_prompt_tokens", "own help", labels, registry=own)
    tokens.labels("w", "p", "both", "0", "m", "stop").inc(3)
    tokens.labels("w", "p", "both", "0", "m", "length").inc(4)
    tokens.labels("w", "p", "both", "1", "m", "stop").inc(5)
    waits = Histogram("sim_queue_seconds", "own help", labels, registry=own, buckets=(1, 2))
    waits.labels("w", "p", "both", "0", "m", "stop").observe(1.5)
    waits.labels("w", "p", "both", "0", "m", "length").observe(0.5)
    found = {family.name: family for family in common_families(own.collect(), common_names())}
    prompt = found["headwater_engine_prompt_tokens"]
    assert prompt.type == "counter"
    assert prompt.documentation == "Prompt tokens of requests, by the engine's own count"
    worker = {"worker": "w", "pool": "p", "role": "both"}
    assert [(one.name, one.labels, one.value) for one in prompt.samples] == [
        ("headwater_engine_prompt_tokens_total", worker | {"rank": "0"}, 7.0),
        ("headwater_engine_prompt_tokens_total", worker | {"rank": "1"}, 5.0),
    ]
    buckets = {
        one.labels["le"]: one.value
        for one in found["headwater_engine_queue_seconds"].samples
        if one.name == "headwater_engine_queue_seconds_bucket"
    }
    assert buckets == {"1.0": 1.0, "2.0": 2.0, "+Inf": 2.0}


def test_what_an_engine_has_not_counted_yet_is_zero() -> None:
    """With the labels of its process, and only what the engine counts at all."""
    labels = {"worker": "w", "pool": "p", "role": "both", "rank": "0", "host": "not kept"}

    def zeros(found: set[str]) -> dict[str, float]:
        families = list(zero_counters(found, labels))
        assert all(set(one.samples[0].labels) == {"worker", "pool", "role", "rank"} for one in families)
        return {one.samples[0].name: one.samples[0].value for one in families}

    assert zeros({"sglang:prompt_tokens", "sglang:generation_tokens"}) == {
        "headwater_engine_cached_prompt_tokens_total": 0.0,
        "headwater_engine_preemptions_total": 0.0,
    }
    assert "headwater_engine_preemptions_total" not in zeros({"trtllm_prompt_tokens"})
    assert zeros(set()) == {}
