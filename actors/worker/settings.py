"""Settings of a worker: types, defaults and descriptions only. Light to import: the command line reads them."""

from ipaddress import ip_address
from typing import Annotated, NamedTuple

from msgspec import Meta

from headwater.engines.traits import Text
from headwater.schemas.events import Role
from headwater.schemas.names import REVISION_MAX, host_port, split_host_port


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
    load_s: float = 120.0
    """Seconds that a request waits for its adapter."""


# What distinguishes a worker.

Label = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]


def _read_endpoint(text: str) -> str:
    try:
        host, port = split_host_port(text)
        usable = 0 < port < 65_536 and text == host_port(str(ip_address(host)), port)
    except ValueError:
        usable = not text
    if not usable:
        raise ValueError(
            f"{text!r} is no address of a gateway's: give IP:PORT, as 10.0.0.7:8000 or [fd00::7]:8000"
        )
    return text


class WorkerProfile(NamedTuple):
    """What a worker is started as. `instance` names the engine instance; the ranks of one engine share it."""

    role: Annotated[
        Role,
        Meta(
            description="what the workers of an `engine` process serve: both legs, prefill only, decode only, or encoding media"
        ),
    ] = "both"
    instance: str = ""
    tier: Annotated[
        Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{0,64}$")],
        Meta(description="service class; requests that name one (x-headwater-tier) go only to its workers"),
    ] = ""
    taints: Annotated[
        tuple[Label, ...],
        Meta(description="reject requests that do not tolerate this (x-headwater-tolerates)"),
    ] = ()
    embedding_format: str = ""
    """Name of the embeddings that encode workers and the workers that read them exchange; empty: the engine's."""
    revision: Annotated[
        Annotated[str, Meta(pattern=f"^[A-Za-z0-9._+-]{{0,{REVISION_MAX}}}$")],
        Meta(
            description="name of what the workers run: prefill and decode workers of one revision make pairs, and `headwater switch` moves "
            "requests from one revision to another (default: made of the engine's version, the model and Headwater's version)"
        ),
    ] = ""
    endpoint: Annotated[
        str,
        Text(_read_endpoint, str, "IP:PORT"),
        Meta(
            description="address at which a gateway reaches the edge beside these workers; `headwater picker` answers with it "
            "(default: none, so that no gateway sends to them)"
        ),
    ] = ""
