"""From settings to the router's queue, to what clients may wish for and to what they may send."""

from headwater.actors.edge.limits import BodyLimits, ConnectionLimits
from headwater.actors.edge.wishes import ClientLimits
from headwater.ops.config import Settings
from headwater.router.admission_queue import QueueSettings
from headwater.router.busy import BusyLimits
from headwater.router.waiting import QueueLimits


def queue_of(settings: Settings) -> QueueSettings:
    """When workers are busy, and the queue's bounds."""
    return QueueSettings(
        BusyLimits(settings.busy_prefill_tokens, settings.busy_kv, settings.busy_waiting),
        QueueLimits(
            settings.queue_requests,
            settings.queue_tokens,
            settings.queue_tenant_share,
            settings.queue_wait_s,
            settings.queue_order,
            settings.queue_ageing,
        ),
    )


def clients_of(settings: Settings) -> ClientLimits:
    """What clients may wish for."""
    return ClientLimits(settings.client_policies, settings.client_temperature_max)


def bodies_of(settings: Settings) -> BodyLimits:
    """What bodies an edge takes."""
    return BodyLimits(settings.body_bytes_max, settings.bodies_bytes_max)


def connections_of(settings: Settings) -> ConnectionLimits:
    """What connections to an edge may do."""
    return ConnectionLimits(
        settings.header_bytes_max,
        settings.headers_max,
        settings.header_timeout_s,
        settings.body_timeout_s,
        settings.connections_max,
        settings.connections_per_address_max,
    )


def flags(settings: Settings, names: tuple[str, ...]) -> list[str]:
    """The command line that says the same to a process of its own."""
    words: list[str] = []
    for name in names:
        value = getattr(settings, name)
        text = ",".join(value) if isinstance(value, tuple) else f"{value}"
        words += ["--" + name.replace("_", "-"), text]
    return words
