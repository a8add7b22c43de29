"""An event of a log as one line of text for people, and as plain data for programs."""

from typing import Any, Final

import msgspec

from headwater.ops.history.explanation import event_line
from headwater.schemas.events import Event
from headwater.schemas.events.fleet import (
    LoadReported,
    RequestsHeld,
    WorkerChanged,
    WorkerControlled,
    WorkerJoined,
)
from headwater.schemas.events.kv import TIER_NAMES, BlocksRemoved, BlocksStored
from headwater.schemas.events.route import Decision
from headwater.schemas.hashing import HASH_BYTES, unpack_hashes

NAMES_MAX: Final = 4
"""Requests of a load report that a line names."""

HASHES: Final = frozenset({"hashes", "assumed"})
"""Fields that are packed block hashes."""


def tag_of(event: Event) -> str:
    """The name of an event's type in the log, such as `route.decided`."""
    return str(type(event).__struct_config__.tag)


def text_of(event: Event) -> str:
    """What an event says, without its name."""
    match event:
        case BlocksStored(hashes=hashes, parent=parent, tier=tier):
            after = f"after {parent:016x}" if parent else "from the start of a prompt"
            return f"{_blocks(hashes)} {after} on {TIER_NAMES[tier]}"
        case BlocksRemoved(hashes=hashes, tier=tier):
            return f"{_blocks(hashes)} from {TIER_NAMES[tier]}"
        case LoadReported():
            return _load(event)
        case RequestsHeld(requests=requests):
            return f"{len(requests)} requests{_names(': ', requests)}"
        case Decision():
            return _decision(event)
        case WorkerJoined() | WorkerChanged():
            return _worker(event)
        case WorkerControlled(arguments=arguments):
            rest = event_line(msgspec.structs.replace(event, arguments=b""))
            return f"{rest.partition(': ')[2]}, arguments {arguments.decode(errors='replace')}"
        case _:
            text = event_line(event).partition(": ")[2]
            # That line is for a request whose name is known.
            request = getattr(event, "request", "")
            return f"{request}: {text}" if request else text


def _worker(event: WorkerJoined | WorkerChanged) -> str:
    """A worker's properties, without those that only programs compare."""
    if isinstance(event, WorkerJoined):
        parts = [
            f"{event.model} on {event.engine}",
            event.role,
            f"{event.total_blocks} blocks of {event.block_size} tokens",
            f"at most {event.max_running} running",
        ]
        parts += [f"tier {event.tier}"] if event.tier else []
    else:
        parts = [event.state, event.role]
        parts += [f"adapters {' '.join(event.loras)}"] if event.loras else []
    parts += [f"taints {' '.join(event.taints)}"] if event.taints else []
    return f"{event.worker}.{event.epoch}: {', '.join(parts)}"


def _blocks(hashes: bytes) -> str:
    count = len(hashes) // HASH_BYTES
    return f"{count} block{'s' if count != 1 else ''}"


def _names(title: str, requests: tuple[str, ...]) -> str:
    if not requests:
        return ""
    rest = f" and {len(requests) - NAMES_MAX} more" if len(requests) > NAMES_MAX else ""
    return f"{title}{', '.join(requests[:NAMES_MAX])}{rest}"


def _load(event: LoadReported) -> str:
    step = f", step {event.step_us / 1000:.1f} ms" if event.step_us else ""
    lists = (
        _names("; accepted ", event.accepted)
        + _names("; first token ", event.prefilled)
        + _names("; ended ", event.finished)
    )
    used = f"KV {event.used_blocks} of {event.total_blocks}"
    return f"running {event.running}, waiting {event.waiting}, {used}{step}{lists}"


def _decision(event: Decision) -> str:
    leg = f" ({event.leg})" if event.leg else ""
    unit = " ms" if any(one.prefill_ms for one in event.candidates) else ""
    waited = f", after {event.waited_ms} ms in the queue" if event.waited_ms else ""
    chosen = event.chosen
    scored = event.scored or len(event.candidates)
    return (
        f"{event.request} to {event.worker}.{event.epoch}{leg}: {chosen.cached_blocks} of {event.blocks} blocks cached, "
        f"cost {chosen.score:.2f}{unit}, {scored} candidate{'s' if scored != 1 else ''}{waited}"
    )


def data_of(event: Event) -> dict[str, Any]:
    """The fields of an event by name; block hashes in hex, other bytes in base64 (by the encoder)."""
    found: dict[str, Any] = _plain(event)
    return found


def _plain(value: Any, field: str = "") -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name), name) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, bytes) and field in HASHES:
        return [f"{one:016x}" for one in unpack_hashes(value).tolist()]
    return value
