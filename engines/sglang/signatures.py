"""The parameters of SGLang's calls that the adapter uses, and which of them each release has.

SGLang's Python interface changes between releases. `LACKS` was recorded from the releases themselves (a test compares it
with the installed one). With a release that is not in it the adapter looks at the installed classes instead: what is
missing is left out where a feature depends on it, and is an error by name where nothing works without it.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import structlog

from headwater.engines.engine import EngineUnavailable

_log = structlog.get_logger("headwater.sglang")


class Used(NamedTuple):
    """Parameters of a call or fields of a class that the adapter gives."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


USED: Final[Mapping[str, Used]] = {
    "GenerateReqInput": Used(
        ("rid", "input_ids", "sampling_params", "stream"),
        (
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
            "lora_path",
            "custom_logit_processor",
            "cache_salt",
            "priority",
            "routed_dp_rank",
            "max_thinking_tokens",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "image_data",
            "mm_hashes",
        ),
    ),
    "EmbeddingReqInput": Used(("rid", "input_ids"), ("dimensions", "lora_path")),
    "BlockStored": Used(
        ("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        ("medium", "cache_salt", "lora_name"),
    ),
    # Several numbers of 62 bits stand for an image; before, one of 30 bits.
    "MultimodalDataItem": Used((), ("pad_values",)),
    "TokenizerManager.generate_request": Used(("obj",)),
    "TokenizerManager.abort_request": Used(("rid",), ("abort_all",)),
    "TokenizerManager.flush_cache": Used((), ("timeout_s",)),
    "TokenizerManager.pause_generation": Used(("obj",)),
    "TokenizerManager.continue_generation": Used(("obj",)),
    "TokenizerManager.release_memory_occupation": Used(("obj",)),
    "TokenizerManager.resume_memory_occupation": Used(("obj",)),
    "TokenizerManager.load_lora_adapter": Used(("obj",)),
    "TokenizerManager.unload_lora_adapter": Used(("obj",)),
}
"""The parameters that are used, by name of the class or method."""

MODULES: Final[Mapping[str, str]] = {
    "GenerateReqInput": "sglang.srt.managers.io_struct",
    "EmbeddingReqInput": "sglang.srt.managers.io_struct",
    "BlockStored": "sglang.srt.disaggregation.kv_events",
    "MultimodalDataItem": "sglang.srt.managers.schedule_batch",
    "TokenizerManager": "sglang.srt.managers.tokenizer_manager",
}

LACKS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "0.5.17": {
        "GenerateReqInput": ("cache_salt",),
        "BlockStored": ("cache_salt", "lora_name"),
        "MultimodalDataItem": ("pad_values",),
    },
    "0.5.18": {"BlockStored": ("cache_salt", "lora_name"), "MultimodalDataItem": ("pad_values",)},
    "0.5.19": {"BlockStored": ("cache_salt", "lora_name"), "MultimodalDataItem": ("pad_values",)},
    "0.5.20": {"BlockStored": ("lora_name",), "MultimodalDataItem": ("pad_values",)},
    "0.5.21": {"BlockStored": ("lora_name",), "MultimodalDataItem": ("pad_values",)},
    "0.5.22": {"MultimodalDataItem": ("pad_values",)},
    "0.5.23": {},
}
"""What each release lacks of `USED`."""


class Signatures:
    """What the release in use has. `lacks`: missing parameters by call."""

    def __init__(self, lacks: Mapping[str, tuple[str, ...]]) -> None:
        self._lacks = {name: frozenset(missing) for name, missing in lacks.items()}

    def has(self, call: str, parameter: str) -> bool:
        """Does this call have this parameter?"""
        return parameter not in self._lacks.get(call, ())

    def keep(self, call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that this call has."""
        lacks = self._lacks.get(call, frozenset())
        return {name: value for name, value in arguments.items() if name not in lacks}


def of_release(version: str) -> Signatures:
    """The signatures of the installed release. Raises `EngineUnavailable` for one without a required parameter."""
    recorded = LACKS.get(version)
    lacks = inspected() if recorded is None else recorded
    if recorded is None:
        missing = {name: parameters for name, parameters in lacks.items() if parameters}
        _log.warning("sglang_version_unknown", version=version, recorded=newest(LACKS), missing=missing)
    for name, parameters in lacks.items():
        absent = sorted(set(parameters) & set(USED[name].required))
        if absent:
            raise EngineUnavailable(
                f"SGLang {version} has no {absent[0]!r} in {name}, which this adapter needs: install "
                f"sglang=={newest(LACKS)}"
            )
    return Signatures(lacks)


def newest(versions: Iterable[str]) -> str:
    """The last release of some."""
    return max(
        versions, key=lambda version: tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    )


def inspected() -> dict[str, tuple[str, ...]]:
    """Return what the installed release lacks of `USED`, by looking at its classes."""
    return {name: missing(used, parameters(_installed(name))) for name, used in USED.items()}


def missing(used: Used, available: Iterable[str]) -> tuple[str, ...]:
    """Return what is used and is not there."""
    present = frozenset(available)
    return tuple(name for name in (*used.required, *used.optional) if name not in present)


def parameters(call: Any) -> tuple[str, ...]:
    """Names of a method's parameters or of a class's fields; nothing of what does not exist."""
    if call is None:
        return ()
    if inspect.isclass(call):
        fields: Iterable[str] = getattr(call, "__struct_fields__", ())
        return (
            tuple(field.name for field in dataclasses.fields(call))
            if dataclasses.is_dataclass(call)
            else tuple(fields)
        )
    return tuple(inspect.signature(call).parameters)


def _installed(name: str) -> Any:
    from importlib import import_module

    owner, _, method = name.partition(".")
    owner_class = getattr(import_module(MODULES[owner]), owner, None)
    return getattr(owner_class, method, None) if method else owner_class
