"""What `--model` may say, and which files are chosen."""

from pathlib import Path

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.worker import WorkerSettings
from headwater.ops.start.model_source import DownloadFailed, ModelSource, parse_source, with_folder
from headwater.ops.start.model_store import RemoteFile, choose


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [
        ("Qwen/Qwen3-0.6B", "", ("hub", "Qwen/Qwen3-0.6B", "")),
        ("Qwen/Qwen3-0.6B@v2", "", ("hub", "Qwen/Qwen3-0.6B", "v2")),
        ("Qwen/Qwen3-0.6B", "v2", ("hub", "Qwen/Qwen3-0.6B", "v2")),
        ("Qwen/Qwen3-0.6B@v2", "v2", ("hub", "Qwen/Qwen3-0.6B", "v2")),
        ("hf://gpt2", "", ("hub", "gpt2", "")),
        ("s3://bucket/models/small/", "", ("store", "small", "")),
        ("https://example.com/models/small", "", ("store", "small", "")),
    ],
)
def test_a_model_is_named_as_everywhere(model: str, revision: str, expected: tuple[str, str, str]) -> None:
    """By the name in a hub, and by a URL."""
    source = parse_source(model, revision)
    assert (source.kind, source.name, source.revision) == expected


def test_a_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that looks like a name of a hub is a folder."""
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_source("org/model") == ModelSource("folder", "model", "org/model")


@pytest.mark.parametrize(
    ("model", "revision", "reason"),
    [
        ("models", "", "no such folder.*ORG/NAME"),
        ("/nowhere/at/all", "", "no such folder"),
        ("./org/model", "", "no such folder"),
        ("ftp://host/model", "", "choose a scheme from hf, s3"),
        ("https://host/model?x=1", "", "without a query"),
        ("org/model@a", "b", "contradicts --model-revision b"),
    ],
)
def test_what_names_no_model_is_rejected(model: str, revision: str, reason: str) -> None:
    """With what to write in its place."""
    with pytest.raises(EngineUnavailable, match=reason):
        parse_source(model, revision)


@pytest.mark.parametrize("model", ["", "smollm2-135m-instruct", "."])
def test_a_revision_of_a_folder_is_rejected(model: str) -> None:
    """It would have no effect."""
    with pytest.raises(EngineUnavailable, match="--model-revision v2 is for models of a hub"):
        with_folder(EngineProcess(worker=WorkerSettings(model=model, model_revision="v2")))


def chosen(*names: str, weights: bool = True) -> list[str]:
    """The names that are downloaded of these."""
    return sorted(one.name for one in choose([RemoteFile(name, 1) for name in names], weights=weights))


def test_one_format_of_the_weights_is_chosen() -> None:
    """The best one; copies, variants, pictures and pages are left out, unless nothing else is there."""
    published = ("config.json", "a.safetensors", "a.fp16.safetensors", "a.bin", "a.png", "original/a.pth")
    assert chosen(*published) == ["a.safetensors", "config.json"]
    assert chosen(*published, weights=False) == ["config.json"]
    assert chosen("config.json", "a.bin", "b.pt") == ["a.bin", "config.json"]
    assert chosen("unet/a.fp16.safetensors", "unet/config.json") == [
        "unet/a.fp16.safetensors",
        "unet/config.json",
    ]
    assert chosen("consolidated.safetensors", "params.json") == ["consolidated.safetensors", "params.json"]
    assert chosen("consolidated.safetensors", "model-00001-of-00002.safetensors") == [
        "model-00001-of-00002.safetensors"
    ]


def test_weights_that_no_engine_loads_are_said_before_the_download() -> None:
    """A repository with GGUF files only is tens of gigabytes of no use."""
    with pytest.raises(DownloadFailed, match=r"q4\.gguf only"):
        chosen("config.json", "q4.gguf", "q8.gguf")
    assert chosen("config.json", "q4.gguf", weights=False) == ["config.json"]
