"""Validation before anything is loaded. Every error names the flag and the fix. Pure."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from headwater.engines.engine import EngineUnavailable
from headwater.engines.vllm.config import cli_arguments, connectors
from headwater.schemas.events.fleet import Role
from headwater.schemas.names import pool_name
from headwater.schemas.tables.card import ModelCard

LEAST_PORT, MOST_PORT = 1024, 65535


class PortRange(NamedTuple):
    """`size` ports starting at `first`, assigned to `owner` by `flag`."""

    flag: str
    owner: str
    first: int
    size: int = 1


def template(path: str) -> str:
    """The chat template in this file."""
    try:
        text = Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise EngineUnavailable(
            f"--chat-template {path}: {reason}. Use a readable Jinja file, or omit it for the model's own"
        ) from error
    if not text.strip():
        raise EngineUnavailable(f"--chat-template {path}: the file is empty. Omit it for the model's own")
    return text


def role(wanted: Role, connector: str, words: Sequence[str], *, needs_vllm: bool = True) -> tuple[str, ...]:
    """The connectors of a worker with this role, from `--connector` and its native arguments.

    A prefill or decode worker of vLLM without any gets NIXL.
    """
    if wanted == "encode":
        # It has no KV.
        return ()
    chosen = connectors.names(connector)
    explicit = cli_arguments.has(words, "kv_transfer_config")
    headless = is_follower(words)
    if headless and wanted != "both":
        raise EngineUnavailable(
            f"--role {wanted} with {headless}: such a process accepts no requests and has no role; give the role to "
            "its leader"
        )
    if connector and explicit:
        raise EngineUnavailable(
            f"--connector {connector} and --kv-transfer-config both set the connectors: use one of them"
        )
    if (
        explicit
        and wanted != "both"
        and not connectors.may_hand_over(cli_arguments.value(words, "kv_transfer_config") or "")
    ):
        raise EngineUnavailable(
            f"--role {wanted} with a --kv-transfer-config whose connectors do not hand KV over from prefill to decode: name "
            f"{' or '.join(sorted(connectors.PULLING))} in it, or leave it out for nixl"
        )
    if wanted == "both" or explicit or not needs_vllm:
        return chosen
    if not connector:
        return ("nixl",)
    if not connectors.hands_over(chosen):
        able = ", ".join(name for name, entry in connectors.CONNECTORS.items() if entry.hands_over)
        raise EngineUnavailable(
            f"--role {wanted} with --connector {connector}: none of these hands KV over from prefill to decode; "
            f"add one of {able}, or omit --connector for nixl"
        )
    return chosen


def is_follower(words: Sequence[str]) -> str:
    """The argument that makes this a process without requests of its own, "" without one."""
    if cli_arguments.has(words, "headless"):
        return "--headless"
    node = cli_arguments.number(words, "node_rank", 0)
    return f"--node-rank {node}" if node else ""


def ports(ranges: Iterable[PortRange]) -> None:
    """Check that all are within 1024 to 65535, and that none overlap."""
    taken: list[PortRange] = []
    for found in sorted(ranges, key=lambda entry: entry.first):
        last = found.first + found.size - 1
        what = f"port {found.first}" if found.size == 1 else f"ports {found.first} to {last}"
        if found.first < LEAST_PORT or last > MOST_PORT:
            raise EngineUnavailable(
                f"{found.flag} {found.first}: {found.owner} would use {what}, and only {LEAST_PORT} to {MOST_PORT} "
                f"are valid; choose one up to {MOST_PORT - found.size + 1}"
            )
        before = taken[-1] if taken else None
        if before is not None and found.first < before.first + before.size:
            raise EngineUnavailable(
                f"{found.flag} {found.first}: {found.owner} would use {what}, which {before.owner} uses "
                f"({before.flag} {before.first}, {before.size} from there); move one of them by "
                f"{before.first + before.size - found.first} or more"
            )
        taken.append(found)


def kv_event_ports(owner: str, endpoint: str, ranks: int, flag: str) -> list[PortRange]:
    """The ports of a native KV event endpoint; none for other sockets than TCP. Rank N adds N to its number."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return []
    port = rest.rpartition(":")[2]
    if not port.isdigit():
        raise EngineUnavailable(f"{flag}: {endpoint} has no port number; write it as tcp://*:5557")
    return [PortRange(flag, owner, int(port), ranks)]


def versions(
    wanted: Role, version: str, model: str, cards: Iterable[ModelCard], live: set[str], *, allow: bool
) -> None:
    """Reject a prefill or decode worker whose vLLM version differs from that of its pool's workers."""
    if wanted == "both" or allow or not version:
        return
    for card in cards:
        if card.pool != pool_name(model, card.block_size) or card.pool not in live or card.engine != "vllm":
            continue
        if card.engine_version and card.engine_version != version:
            raise EngineUnavailable(
                f"--role {wanted}: vLLM {version} here, {card.engine_version} in pool {card.pool}, and KV moves "
                f"between equal versions only; install vllm=={card.engine_version}, or start with "
                "--allow-mixed-versions and the other role's workers of this version next"
            )
