"""Settings of the router's queue and of clients' wishes: what they come to, and how `up` passes them on."""

import msgspec
import pytest

from headwater.actors.edge.wishes import ClientLimits
from headwater.ops import cli, config, queue_settings
from headwater.ops.config import ConfigError, Settings
from headwater.router.admission_queue import QueueSettings
from headwater.router.busy import BusyLimits
from headwater.router.waiting import QueueLimits


def test_by_default_a_worker_is_busy_with_more_than_a_long_prompt() -> None:
    """And everything else as the parts themselves have it."""
    assert queue_settings.queue_of(Settings()) == QueueSettings(BusyLimits(131_072), QueueLimits())
    assert queue_settings.clients_of(Settings()) == ClientLimits()


def test_what_up_is_told_its_router_and_edge_are_told() -> None:
    """By flags of theirs, an empty list too."""
    settings = Settings(
        busy_prefill_tokens=7,
        busy_kv=0.5,
        busy_waiting=3,
        queue_requests=0,
        queue_tokens=9,
        queue_tenant_share=0.25,
        queue_wait_s=2.5,
        queue_order="shortest_uncached",
        queue_ageing=10.0,
        client_policies=(),
        client_temperature_max=0.0,
    )
    router = ["router", *queue_settings.flags(settings, config.QUEUE)]
    passed = config.resolve(cli.parser().parse_args(router), {})
    assert queue_settings.queue_of(passed) == queue_settings.queue_of(settings)
    limits = QueueLimits(0, 9, 0.25, 2.5, "shortest_uncached", 10.0)
    assert queue_settings.queue_of(passed) == QueueSettings(BusyLimits(7, 0.5, 3), limits)
    for policies in ((), ("kv", "random")):
        own = msgspec.structs.replace(settings, client_policies=policies)
        edge = ["edge", *queue_settings.flags(own, config.CLIENTS)]
        passed = config.resolve(cli.parser().parse_args(edge), {})
        assert queue_settings.clients_of(passed) == ClientLimits(policies, 0.0)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--queue-tenant-share", "0"),
        ("--queue-tenant-share", "1.1"),
        ("--queue-wait-s", "0"),
        ("--busy-kv", "-1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(flag: str, value: str) -> None:
    """With the flag's name."""
    with pytest.raises(ConfigError, match=flag):
        config.resolve(cli.parser().parse_args(["router", flag, value]), {})
