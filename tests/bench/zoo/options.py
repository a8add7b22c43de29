"""Options of `python -m tests.bench zoo`."""

from typing import Annotated, NamedTuple

from msgspec import Meta


class ZooOptions(NamedTuple):
    """Which cells are run and how. Lists are separated by commas; empty: all."""

    classes: Annotated[str, Meta(description="classes of traffic, as agents,cold")] = ""
    loads: Annotated[str, Meta(description="levels of load, as light,heavy")] = ""
    policies: Annotated[
        str, Meta(description="routing policies; round_robin is always run, as the reference")
    ] = ""
    seed: Annotated[int, Meta(description="seed of the traffic")] = 1
    jobs: Annotated[int, Meta(ge=1, description="cells simulated in parallel")] = 1
    blocks: Annotated[int, Meta(ge=100, description="KV blocks of 512 tokens per worker")] = 2_000
    requests: Annotated[int, Meta(ge=1, description="requests per worker")] = 150
    write: Annotated[str, Meta(description="folder for the traces, in Mooncake's format, to keep")] = ""
    peer_python: Annotated[
        tuple[str, ...],
        Meta(
            description="Python interpreter of an environment with ai-dynamo, whose replay reads the same "
            "traces; repeat for several releases"
        ),
    ] = ()
