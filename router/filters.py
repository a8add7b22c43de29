"""Which workers may take a request at all: filters one after the other, each with a reason for when it leaves nobody."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headwater.router.worker import Worker
from headwater.schemas.fleet import LORA_ON_DEMAND
from headwater.schemas.route import RouteQuery


class Filter(NamedTuple):
    """`keeps` says whether a worker may take a request; `reason` what to say where it keeps none.

    A filter that does not `matter` to a request keeps all.
    """

    name: str
    matters: Callable[[RouteQuery], bool]
    keeps: Callable[[Worker, RouteQuery], bool]
    reason: Callable[[RouteQuery], str]


def _has(worker: Worker, need: str) -> bool:
    # Workers of releases that did not tell are taken for able: the engine refuses by itself.
    return not worker.capabilities or need in worker.capabilities


def _can(worker: Worker, query: RouteQuery) -> bool:
    return all(_has(worker, need) for need in query.needs)


def _serves_adapter(worker: Worker, query: RouteQuery) -> bool:
    name = query.lora_name
    return name in worker.loras or (worker.lora_slots > 0 and LORA_ON_DEMAND in worker.capabilities)


def _decodes_behind(worker: Worker, query: RouteQuery) -> bool:
    return worker.role != "prefill" and worker.pairs_with == query.pairs_with


FILTERS: tuple[Filter, ...] = (
    Filter(
        "capability",
        lambda query: bool(query.needs),
        _can,
        lambda query: f"can do {', '.join(query.needs)}",
    ),
    Filter(
        "adapter",
        lambda query: bool(query.lora_name),
        _serves_adapter,
        lambda query: f"holds or may load adapter {query.lora_name}",
    ),
    Filter(
        "tier",
        lambda query: bool(query.tier),
        lambda worker, query: worker.tier == query.tier,
        lambda query: f"is of tier {query.tier}",
    ),
    Filter(
        "taint",
        lambda query: True,
        lambda worker, query: not worker.taints or set(worker.taints) <= set(query.tolerates),
        lambda query: "is free of taints that the request does not tolerate",
    ),
    Filter(
        "role",
        lambda query: query.asked == "decode",
        _decodes_behind,
        lambda query: "can decode behind that prefill",
    ),
    Filter(
        "state",
        lambda query: True,
        lambda worker, query: worker.takes_requests,
        lambda query: "takes requests (draining, paused or asleep)",
    ),
    Filter(
        "failure",
        lambda query: bool(query.exclude),
        lambda worker, query: f"{worker.name}.{worker.epoch}" not in query.exclude,
        lambda query: "has not just failed this request",
    ),
)
"""What can not change soon comes first: it is the better reason."""


def able(workers: Sequence[Worker], query: RouteQuery) -> list[Worker]:
    """The workers that all filters keep."""
    left = list(workers)
    for filter in FILTERS:
        if filter.matters(query):
            left = [worker for worker in left if filter.keeps(worker, query)]
    return left


def why_none(workers: Sequence[Worker], query: RouteQuery) -> str:
    """What to tell a client for whom there is no worker."""
    if not workers:
        return "no worker has joined this pool"
    if query.pinned and query.pinned not in {worker.name for worker in workers}:
        return f"worker {query.pinned} is gone"
    left = list(workers)
    for filter in FILTERS:
        if not filter.matters(query):
            continue
        kept = [worker for worker in left if filter.keeps(worker, query)]
        if not kept:
            rest = "" if len(left) == len(workers) else f" that are left of {len(workers)}"
            return f"none of the {len(left)} workers{rest} {filter.reason(query)}"
        left = kept
    return f"none of the {len(workers)} workers may take the request"
