"""What can be seen to be wrong before anything is loaded. Every error names the flag and the mend. Pure."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from headwater.engines.engine import EngineUnavailable
from headwater.engines.vllm import connectors, native
from headwater.schemas.card import ModelCard
from headwater.schemas.fleet import Role
from headwater.schemas.names import pool_name, slug

LEAST_PORT, MOST_PORT = 1024, 65535


class Ports(NamedTuple):
    """`size` ports from `first` on, that `flag` gives to `owner`."""

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
            f"--chat-template {path}: {reason}. Give a readable Jinja file, or leave it out for the model's own"
        ) from error
    if not text.strip():
        raise EngineUnavailable(
            f"--chat-template {path}: the file is empty. Leave it out for the model's own"
        )
    return text


def role(wanted: Role, connector: str, words: Sequence[str], *, needs_vllm: bool = True) -> tuple[str, ...]:
    """The connectors of a worker with this role, from `--connector` and its native arguments.

    A prefill or decode worker of vLLM without any gets NIXL.
    """
    chosen = connectors.names(connector)
    explicit = native.has(words, "kv_transfer_config")
    headless = is_follower(words)
    if headless and wanted != "both":
        raise EngineUnavailable(
            f"--role {wanted} with {headless}: such a process takes no requests and has no role; give the role to "
            "its leader"
        )
    if connector and explicit:
        raise EngineUnavailable(
            f"--connector {connector} and --kv-transfer-config both say which connectors there are: give one"
        )
    if wanted == "both" or explicit or not needs_vllm:
        return chosen
    if not connector:
        return ("nixl",)
    if not connectors.hands_over(chosen):
        able = ", ".join(name for name, entry in connectors.CONNECTORS.items() if entry.hands_over)
        raise EngineUnavailable(
            f"--role {wanted} with --connector {connector}: nothing there hands KV over between prefill and decode; "
            f"add one of {able}, or leave --connector out for nixl"
        )
    return chosen


def is_follower(words: Sequence[str]) -> str:
    """The argument that makes this a process without requests of its own, "" if it is none."""
    if native.has(words, "headless"):
        return "--headless"
    node = native.number(words, "node_rank", 0)
    return f"--node-rank {node}" if node else ""


def ports(ranges: Iterable[Ports]) -> None:
    """All within 1024 to 65535, and none twice."""
    taken: list[Ports] = []
    for found in sorted(ranges, key=lambda entry: entry.first):
        last = found.first + found.size - 1
        what = f"port {found.first}" if found.size == 1 else f"ports {found.first} to {last}"
        if found.first < LEAST_PORT or last > MOST_PORT:
            raise EngineUnavailable(
                f"{found.flag} {found.first}: {found.owner} would use {what}, and only {LEAST_PORT} to {MOST_PORT} "
                f"can be used; choose one up to {MOST_PORT - found.size + 1}"
            )
        before = taken[-1] if taken else None
        if before is not None and found.first < before.first + before.size:
            raise EngineUnavailable(
                f"{found.flag} {found.first}: {found.owner} would use {what}, which {before.owner} takes "
                f"({before.flag} {before.first}, {before.size} from there); move one of them by "
                f"{before.first + before.size - found.first} or more"
            )
        taken.append(found)


def kv_event_ports(owner: str, endpoint: str, ranks: int, flag: str) -> list[Ports]:
    """The ports of a native KV event endpoint; none for other sockets than TCP. Rank N adds N to its number."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return []
    port = rest.rpartition(":")[2]
    if not port.isdigit():
        raise EngineUnavailable(f"{flag}: {endpoint} has no port number; write it as tcp://*:5557")
    return [Ports(flag, owner, int(port), ranks)]


def block_size(model: str, wanted: int, cards: Iterable[ModelCard], live: set[str]) -> None:
    """Refuse a block size other than that of the pool which serves this model now (`live`: pools with workers)."""
    for card in cards:
        same = card.pool == pool_name(model, card.block_size)
        if same and card.pool in live and card.block_size != wanted:
            raise EngineUnavailable(
                f"--block-size {wanted}: pool {card.pool} serves {slug(model)} in blocks of {card.block_size} tokens, "
                f"and blocks of another size are of no use to it; start with --block-size {card.block_size}, or in "
                "another --namespace"
            )


def versions(
    wanted: Role, version: str, model: str, cards: Iterable[ModelCard], live: set[str], *, allow: bool
) -> None:
    """Refuse a prefill or decode worker whose vLLM differs from the one that its pool's workers run."""
    if wanted == "both" or allow or not version:
        return
    for card in cards:
        if card.pool != pool_name(model, card.block_size) or card.pool not in live or card.engine != "vllm":
            continue
        if card.engine_version and card.engine_version != version:
            raise EngineUnavailable(
                f"--role {wanted}: vLLM {version} here, {card.engine_version} in pool {card.pool}, and KV moves "
                f"between equal versions only; install vllm=={card.engine_version}, or start with "
                "--allow-mixed-versions yes and the other role's workers of this version next"
            )
