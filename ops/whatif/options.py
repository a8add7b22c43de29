"""Options of `headwater whatif` and `headwater tune` besides the columns: output, and how to search.

Light to import: the command line reads them from here.
"""

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from headwater.ops.config.setting import Flag

Objective = Literal["ttft_mean", "ttft_p50", "ttft_p99", "itl_mean", "e2e_mean", "reuse"]


class Runs(NamedTuple):
    """The requests that are simulated, and how."""

    requests: Annotated[int, Meta(ge=0, description="only the first N requests; 0: all")] = 0
    jobs: Annotated[int, Meta(ge=1, description="columns simulated in parallel")] = 1
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON")] = False


class Search(NamedTuple):
    """How `headwater tune` searches."""

    objective: Annotated[Objective, Meta(description="figure to improve")] = "ttft_mean"
    names: Annotated[tuple[str, ...], Flag("search"), Meta(description="weights to search")] = (
        "crowding",
        "queued",
        "arrivals",
        "memory",
    )
    trials: Annotated[int, Meta(ge=1, description="number of runs")] = 40
    seed: Annotated[int, Meta(description="seed of the search")] = 0
    share: Annotated[
        float,
        Meta(
            ge=0.1,
            le=0.9,
            description="share of the requests to search on, the first ones; the rest evaluate",
        ),
    ] = 0.6
    guard: Annotated[
        float, Meta(ge=0, description="by which share each other latency figure may get worse")
    ] = 0.02
