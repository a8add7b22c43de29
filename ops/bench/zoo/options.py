"""Options of `headwater bench whatif --zoo`. Light to import: the command line reads them from here."""

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

Study = Literal["compare", "frontier", "cross-validation"]


class ZooOptions(NamedTuple):
    """Which cells are run and how. Lists are separated by commas; empty: all."""

    study: Annotated[
        Study,
        Meta(
            description="with --zoo: compare: kv with every other policy and the peers; frontier: what kv gives for values of "
            "crowding, which trades TTFT for ITL, and which peers lie outside; cross-validation: weights of kv chosen on all "
            "classes but one, and what they give there"
        ),
    ] = "compare"
    classes: Annotated[str, Meta(description="with --zoo: classes of traffic, as agents,cold")] = ""
    loads: Annotated[str, Meta(description="with --zoo: levels of load, as light,heavy")] = ""
    policies: Annotated[
        str, Meta(description="with --zoo: routing policies; round_robin is always run, as the reference")
    ] = ""
    seed: Annotated[int, Meta(description="with --zoo: seed of the traffic")] = 1
    jobs: Annotated[int, Meta(ge=1, description="with --zoo: cells simulated in parallel")] = 1
    blocks: Annotated[int, Meta(ge=100, description="with --zoo: KV blocks of 512 tokens per worker")] = 2_000
    requests: Annotated[int, Meta(ge=1, description="with --zoo: requests per worker")] = 150
    write: Annotated[
        str, Meta(description="with --zoo: folder for the traces, in Mooncake's format, to keep")
    ] = ""
    peer_python: Annotated[
        tuple[str, ...],
        Meta(
            description="with --zoo: Python interpreter of an environment with ai-dynamo, whose replay reads the same "
            "traces; repeat for several releases"
        ),
    ] = ()
