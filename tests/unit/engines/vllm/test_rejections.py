"""Which of vLLM's exceptions reject a request: in each hierarchy that its releases have had."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headwater.engines.engine import NotSupported, RequestRejected
from headwater.engines.vllm import sampling
from headwater.engines.vllm.sampling import TEXT_MAX, rejection_of


class EngineGenerateError(Exception):
    """As vLLM calls what it wraps around whatever `generate` met."""


class FakeClientError(Exception):
    """The base class of newer releases."""


class FakeValidationError(FakeClientError):
    """What says which field is wrong."""

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    def __str__(self) -> str:
        return f"{super().__str__()} (parameter={self.parameter}, value={self.value})"


class OldValidationError(ValueError):
    """Before there was a base class."""

    parameter = "top_p"


def module(**classes: type[Exception]) -> ModuleType:
    """`vllm.exceptions` of a release."""
    made = ModuleType("vllm.exceptions")
    vars(made).update(classes)
    return made


def installed() -> ModuleType:
    """The module of the installed release, without the package around it: importing that takes seconds."""
    package = find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    spec = spec_from_file_location(
        "vllm.exceptions", Path(package.submodule_search_locations[0], "exceptions.py")
    )
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(params=["newer", "older", "oldest", "installed"])
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The exceptions of a release of vLLM; the installed one where it is."""
    if request.param == "installed":
        made = installed()
    else:
        classes: dict[str, dict[str, type[Exception]]] = {
            "newer": {"VLLMClientError": FakeClientError, "VLLMValidationError": FakeValidationError},
            "older": {"VLLMValidationError": OldValidationError},
            "oldest": {},
        }
        made = module(**classes[request.param])
    package = ModuleType("vllm")
    vars(package)["exceptions"] = made
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.exceptions", made)
    sampling._client_errors.cache_clear()
    yield made
    sampling._client_errors.cache_clear()


def wrapped(error: Exception | None) -> Exception:
    """As `AsyncLLM.generate` raises what it does not know."""
    outer = EngineGenerateError()
    outer.__cause__ = error
    return outer


def validation_error(release: ModuleType, message: str, **more: Any) -> Exception:
    """The release's validation error, where it has one of its own."""
    kind = getattr(release, "VLLMValidationError", ValueError)
    made: Exception = kind(message) if issubclass(kind, ValueError) else kind(message, **more)
    return made


def test_a_validation_error_names_its_field(release: ModuleType) -> None:
    """By the API's name, raised as it is or wrapped; its text does not repeat the value."""
    error = validation_error(release, "top_p must be in (0, 1]", parameter="top_p", value="x" * 100)
    for raised in (error, wrapped(error)):
        found = rejection_of(raised)
        assert found is not None
        assert str(found) == "top_p must be in (0, 1]"
        assert found.param == getattr(error, "parameter", "")
        assert not found.retryable


def test_a_field_that_is_not_told_is_empty(release: ModuleType) -> None:
    """The edge then names none, or the one that it knows of."""
    error = validation_error(release, "bad")
    vars(error)["parameter"] = None
    found = rejection_of(error)
    assert found is not None
    assert found.param == ""


def test_a_value_error_is_a_rejection(release: ModuleType) -> None:
    """Older releases raise nothing else for what is wrong with a request."""
    for raised in (ValueError("too long"), wrapped(ValueError("too long")), wrapped(TypeError("no number"))):
        found = rejection_of(raised)
        assert found is not None
        assert str(found) in ("too long", "no number")
        assert found.param == ""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        MemoryError(),
        TimeoutError("no answer"),
        KeyError("r1"),
        AssertionError(),
        TypeError("a mistake of ours"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        wrapped(RuntimeError("CUDA out of memory")),
        wrapped(AssertionError()),
        wrapped(None),
    ],
    ids=repr,
)
def test_an_engine_that_fails_rejects_nothing(release: ModuleType, error: Exception) -> None:
    """Another worker may answer the request."""
    assert rejection_of(error) is None


@pytest.mark.parametrize("release", ["installed"], indirect=True)
def test_the_installed_releases_own_failures_reject_nothing(release: ModuleType) -> None:
    """A dead engine, a queue that is full now, a failure that may be tried again."""
    known = release
    errors = [known.GenerationError(), known.VLLMServerError("x")]
    errors += [
        getattr(known, name)()
        for name in ("RetryableRequestError", "QueueOverflowError", "MaxQueuedTokensError")
        if hasattr(known, name)
    ]
    assert [rejection_of(error) for error in errors] == [None] * len(errors)
    assert [rejection_of(wrapped(error)) for error in errors] == [None] * len(errors)


@pytest.mark.parametrize("release", ["installed"], indirect=True)
def test_every_client_error_of_the_installed_release_is_a_rejection(release: ModuleType) -> None:
    """Whatever classes it has below the base class."""
    known = release
    another = type("Another", (known.VLLMClientError,), {})
    assert rejection_of(another("no")) is not None
    assert rejection_of(known.VLLMNotFoundError("no such thing")) is not None
    missing = rejection_of(known.LoRAAdapterNotFoundError("rivers", "/adapters/rivers"))
    assert missing is not None
    assert "No adapter found for /adapters/rivers" in str(missing)


def test_our_own_rejection_stays_what_it_is() -> None:
    """With its field and kind."""
    for error in (RequestRejected("no", param="stop"), NotSupported("sim", "logprobs")):
        assert rejection_of(error) is error


def test_a_text_that_repeats_the_request_is_cut(release: ModuleType) -> None:
    """Some repeat the whole value."""
    found = rejection_of(validation_error(release, "x" * 10 * TEXT_MAX))
    assert found is not None
    assert len(str(found)) == TEXT_MAX


class Wordy(ValueError):
    """Like pydantic's: its text is made of fields, and `args` is empty."""

    def __init__(self) -> None:
        super().__init__()

    def __str__(self) -> str:
        return "1 validation error for StructuredOutputsParams"


def test_an_error_without_arguments_says_what_it_says(release: ModuleType) -> None:
    """The client is told what is wrong, not the name of a class."""
    found = rejection_of(Wordy())
    assert found is not None
    assert str(found) == "1 validation error for StructuredOutputsParams"
    found = rejection_of(ValueError())
    assert found is not None
    assert str(found) == "ValueError"
