"""Configurations and weights of adapters that are refused, each with its reason."""

from pathlib import Path

import pytest

from headwater.engines.lora_cache import LoraCache, LoraError
from headwater.engines.lora_sources import CONFIG, WEIGHTS, same_base
from tests.support.data.lora_archives import PICKLE
from tests.support.engines.adapters import files, make_adapter, safetensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder that is allowed, with nothing in it."""
    folder = tmp_path / "allowed"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path: Path, source: Path) -> LoraCache:
    """An empty cache that may fetch from it."""
    return files(tmp_path / "cache", source)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b"not JSON", "not readable"),
        (b"[]", "not readable"),
        (b"{}", "no valid rank"),
        (b'{"r": 0}', "no valid rank"),
        (b'{"r": "8"}', "no valid rank"),
        (b'{"r": 8, "rank_pattern": {"q": -1}}', "no valid rank"),
        (b'{"r": 8, "peft_type": "IA3"}', "'IA3'"),
        (b'{"r": 2}', "says rank 2.*of rank 4"),
        (b" " * (2 << 20), "larger than 1 MiB"),
    ],
)
async def test_a_config_that_is_not_usable_is_refused(
    cache: LoraCache, source: Path, config: bytes, why: str
) -> None:
    """By what is wrong with it."""
    folder = make_adapter(source / "one", rank=4)
    (folder / CONFIG).write_bytes(config)
    with pytest.raises(LoraError, match=why) as caught:
        await cache.fetch(str(folder))
    assert caught.value.status == 400


async def test_the_greatest_rank_counts(cache: LoraCache, source: Path) -> None:
    """A pattern may give some layers more."""
    folder = make_adapter(source / "one", rank=4, rank_pattern={"v_proj": 12, "q_proj": 2})
    assert (await cache.fetch(str(folder))).rank == 12


@pytest.mark.parametrize(
    "weights",
    [
        PICKLE,
        b"",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (10).to_bytes(8, "little") + b'{"a": 123}',
        safetensors({})[:8],
    ],
    ids=["pickle", "empty", "header too long", "no matrices", "a list", "no tensor", "cut in the header"],
)
async def test_weights_that_are_no_safetensors_are_refused(
    cache: LoraCache, source: Path, weights: bytes
) -> None:
    """Whatever the file is called."""
    folder = make_adapter(source / "one")
    (folder / WEIGHTS).write_bytes(weights)
    with pytest.raises(LoraError, match=WEIGHTS):
        await cache.fetch(str(folder))


async def test_weights_that_are_cut_short_are_refused(cache: LoraCache, source: Path) -> None:
    """An interrupted upload must not become an adapter."""
    folder = make_adapter(source / "one")
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-1])
    with pytest.raises(LoraError, match="truncated"):
        await cache.fetch(str(folder))


async def test_pickled_weights_are_refused_by_name(cache: LoraCache, source: Path) -> None:
    """With what to do about it."""
    folder = make_adapter(source / "one")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(LoraError, match=r"adapter_model\.bin, which may run code.*Save them as"):
        await cache.fetch(str(folder))


def test_a_base_model_is_known_by_the_last_part_of_its_name() -> None:
    """Its author's hub and our folder differ in what comes before."""
    names = ("smollm2-135m-instruct", "chat")
    assert same_base("HuggingFaceTB/SmolLM2-135M-Instruct", names)
    assert same_base("/models/smollm2-135m-instruct/", names)
    assert same_base("", names), "it names none"
    assert not same_base("HuggingFaceTB/SmolLM2-360M-Instruct", names)
