"""Filters: which workers may take a request at all. They run in order, each with the reason to report when it leaves none.

All but the last test what workers have in common with others (`Traits`), so that a decision tests each kind of worker once. The last
leaves out incarnations by name.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from headwater.router.fold.worker import Traits, Worker
from headwater.schemas.constraints import Constraints
from headwater.schemas.events.fleet import LORA_ON_DEMAND


class Filter(NamedTuple):
    """`keeps` tests one kind of worker; `reason` completes "none of the workers …". Skipped for requests it does not apply to."""

    name: str
    applies: Callable[[Constraints], bool]
    keeps: Callable[[Traits, Constraints], bool]
    reason: Callable[[Constraints], str]


def _has_capabilities(worker: Traits, wanted: Constraints) -> bool:
    # A worker that published no capabilities passes: its engine refuses what it cannot do.
    return not worker.capabilities or all(need in worker.capabilities for need in wanted.needs)


def _serves_lora(worker: Traits, wanted: Constraints) -> bool:
    loadable = worker.lora_slots > 0 and LORA_ON_DEMAND in worker.capabilities
    return wanted.lora_name in worker.loras or loadable


def _can_continue(worker: Traits, wanted: Constraints) -> bool:
    return worker.role != "prefill" and worker.pairs_with == wanted.pairs_with


FILTERS: Final[tuple[Filter, ...]] = (
    Filter(
        "capability",
        lambda wanted: bool(wanted.needs),
        _has_capabilities,
        lambda wanted: f"supports {', '.join(wanted.needs)}",
    ),
    Filter(
        "encode",
        lambda wanted: "encode" not in wanted.needs,
        lambda worker, wanted: worker.role != "encode",
        lambda wanted: "generates (all only encode media)",
    ),
    Filter(
        "embeddings",
        lambda wanted: "encode" in wanted.needs and bool(wanted.pairs_with),
        lambda worker, wanted: worker.pairs_with == wanted.pairs_with,
        lambda wanted: f"computes embeddings of the format {wanted.pairs_with}",
    ),
    Filter(
        "lora",
        lambda wanted: bool(wanted.lora_name),
        _serves_lora,
        lambda wanted: f"has LoRA adapter {wanted.lora_name} or can load it",
    ),
    Filter(
        "tier",
        lambda wanted: bool(wanted.tier),
        lambda worker, wanted: worker.tier == wanted.tier,
        lambda wanted: f"is of tier {wanted.tier}",
    ),
    Filter(
        "engine",
        lambda wanted: bool(wanted.engine),
        lambda worker, wanted: worker.engine == wanted.engine,
        lambda wanted: f"runs {wanted.engine}",
    ),
    Filter(
        "taint",
        lambda wanted: True,
        lambda worker, wanted: not worker.taints or set(worker.taints) <= set(wanted.tolerates),
        lambda wanted: "is free of taints that the request does not tolerate",
    ),
    Filter(
        "tokenizer",
        lambda wanted: bool(wanted.tokenizer),
        # A worker of a release that published none passes.
        lambda worker, wanted: worker.tokenizer in ("", wanted.tokenizer),
        lambda wanted: "has the tokenizer of the answer so far, so none can continue it",
    ),
    Filter(
        "media processor",
        lambda wanted: bool(wanted.media_processor),
        # A worker of a release that published none passes.
        lambda worker, wanted: worker.media_processor in ("", wanted.media_processor),
        lambda wanted: "processes media with the settings of the model card (restart those with other ones)",
    ),
    Filter(
        "role",
        lambda wanted: wanted.leg == "decode",
        _can_continue,
        lambda wanted: "can decode a prompt prefilled there",
    ),
    Filter(
        "state",
        lambda wanted: True,
        lambda worker, wanted: worker.takes_requests,
        lambda wanted: "takes requests (all are draining, paused or asleep)",
    ),
)
"""Permanent reasons come before passing ones: they are the more useful error."""


EXCLUDED_REASON: Final = "has not just failed this request"


def allows(traits: Traits, wanted: Constraints) -> bool:
    """Does a worker with these traits pass all filters, unless it is excluded by name?"""
    return all(filter.keeps(traits, wanted) for filter in FILTERS if filter.applies(wanted))


def _passes(filter: Filter, wanted: Constraints, worker: Worker) -> bool:
    return filter.keeps(worker.traits, wanted)


def _steps(wanted: Constraints) -> Iterator[tuple[str, Callable[[Worker], bool]]]:
    """(reason, test) of each filter that applies."""
    for filter in FILTERS:
        if filter.applies(wanted):
            yield filter.reason(wanted), partial(_passes, filter, wanted)
    if wanted.exclude:
        yield EXCLUDED_REASON, lambda worker: f"{worker.name}.{worker.epoch}" not in wanted.exclude


def explain_no_worker(workers: Sequence[Worker], wanted: Constraints) -> str:
    """The error for a request that no worker may take: the first filter that leaves none."""
    if not workers:
        return "no worker has joined this pool"
    if wanted.pinned and wanted.pinned not in {worker.name for worker in workers}:
        return f"worker {wanted.pinned} is not in this pool"
    left = list(workers)
    for reason, keeps in _steps(wanted):
        passed = [worker for worker in left if keeps(worker)]
        if not passed:
            rest = "" if len(left) == len(workers) else f" left of {len(workers)}"
            return f"none of the {len(left)} workers{rest} {reason}"
        left = passed
    if wanted.pinned:
        left = [worker for worker in left if worker.name == wanted.pinned]
    if left and not any(worker.serves_whole for worker in left):
        return _explain_split(left, wanted)
    return f"none of the {len(workers)} workers may take the request"


def _explain_split(workers: Sequence[Worker], wanted: Constraints) -> str:
    """Workers that only serve the legs of split requests passed the filters, and no two of them make a pair."""
    roles = {worker.role for worker in workers}
    if wanted.pinned and "prefill" not in roles:
        return f"worker {wanted.pinned} only decodes prompts that another worker prefilled"
    missing = next((role for role in ("prefill", "decode") if role not in roles), "")
    needed = f"a {missing} worker" if missing else "a prefill and a decode worker that can exchange KV"
    return f"the engines of this pool serve only split requests: it needs {needed}"
