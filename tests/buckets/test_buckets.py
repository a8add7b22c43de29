"""Models in buckets of the clouds' emulators."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.ops.start.model_source import fetch, parse_source
from tests.buckets.emulators import Azure, Emulator, Google, running

pytestmark = [pytest.mark.soak, pytest.mark.processes]

WEIGHTS = "model.safetensors"

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"model": {}}',
    WEIGHTS: bytes(range(250)) * 40_000,
    "a folder/näme+1%.json": b"{}",
}


@pytest.fixture(params=[Google, Azure], ids=["gs", "az"])
def emulator(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Emulator]:
    """An emulator that has the model at bucket/models/small."""
    with running(request.param(tmp_path)) as made:
        for name, value in made.settings.items():
            monkeypatch.setenv(name, value)
        for name, data in {**FILES, "README.md": b"# A model"}.items():
            made.put(f"models/small/{name}", data)
        yield made


def test_a_model_is_downloaded(emulator: Emulator, tmp_path: Path) -> None:
    """It is there once, continues where it ended, and is another one when a file at the source is."""
    source, cache = parse_source(f"{emulator.scheme}://bucket/models/small"), tmp_path / "cache"
    found = fetch(source, weights=True, cache=cache)
    whole = {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()}
    assert whole == FILES
    assert fetch(source, weights=True, cache=cache) == found
    part = found.with_name(f".{found.name}.part")
    found.rename(part)
    (part / "tokenizer.json").unlink()
    with (part / WEIGHTS).open("r+b") as file:
        file.truncate(3_000_001)
    assert fetch(source, weights=True, cache=cache) == found
    assert (found / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    emulator.put("models/small/config.json", b"{}")
    changed = fetch(source, weights=True, cache=cache)
    assert changed != found
    assert (changed / "config.json").read_bytes() == b"{}"


def test_what_is_not_there_is_said_so(emulator: Emulator, tmp_path: Path) -> None:
    """A folder without a model, and a bucket that nobody made."""
    with pytest.raises(EngineUnavailable, match=r"/none: there is no config\.json"):
        fetch(parse_source(f"{emulator.scheme}://bucket/models/none"), weights=True, cache=tmp_path)
    with pytest.raises(EngineUnavailable, match=r"nobucket.* What was downloaded stays"):
        fetch(parse_source(f"{emulator.scheme}://nobucket/models/small"), weights=True, cache=tmp_path)
