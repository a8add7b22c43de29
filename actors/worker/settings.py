"""Settings of a worker: types, defaults and descriptions only. Light to import: the command line reads them."""

from typing import Annotated, NamedTuple

from msgspec import Meta


class HealthSettings(NamedTuple):
    """When an engine counts as dead."""

    canary_s: Annotated[
        float, Meta(gt=0, description="seconds that a new engine has to answer its first request")
    ] = 120.0
    idle_s: Annotated[
        float,
        Meta(ge=0, description="seconds of idleness after which an engine is probed; 0 disables probes"),
    ] = 10.0
    probe_s: float = 20.0
    """Seconds that an idle engine has to answer a probe."""
    stuck_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds without output after which an engine with running requests counts as dead; 0 disables",
        ),
    ] = 600.0


class LoraLoading(NamedTuple):
    """The LoRA adapters that a worker loads, and how long a request waits for one."""

    on_demand: Annotated[bool, Meta(description="load an adapter when a request names it")] = False
    check_base: Annotated[bool, Meta(description="reject adapters trained on another base model")] = True
    load_s: Annotated[float, Meta(gt=0, description="seconds that a request waits for its adapter")] = 120.0
