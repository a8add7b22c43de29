"""Settings: flags, then environment (HEADWATER_<NAME>), then a file, then defaults. One table of names."""

import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from headwater.actors.edge.limits import BodyLimits, ConnectionLimits
from headwater.engines.vllm import native
from headwater.ops import config_file
from headwater.ops.config_file import ConfigError as ConfigError
from headwater.ops.config_help import HELP
from headwater.schemas.fleet import Role
from headwater.schemas.request import PayloadKind
from headwater.schemas.route import CLIENT_POLICIES

ENV_PREFIX = "HEADWATER_"
KEY_VARIABLE = ENV_PREFIX + "CONFIG_KEY"

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Size = Annotated[int, msgspec.Meta(ge=0)]
YesNo = Literal["no", "yes"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of every command. `help_texts` says what each is for."""

    namespace: str = "default"
    nats: str = ""
    nats_port: Port = 4222
    nats_keys_dir: str = ""
    nats_nkey_file: str = ""
    nats_creds_file: str = ""
    nats_tls_ca: str = ""
    nats_tls_cert: str = ""
    nats_tls_key: str = ""
    nats_tls_first: YesNo = "no"
    replicas: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1
    data_dir: str = "headwater-data"
    cache_dir: str = ""
    engine: Literal["vllm", "sim"] = "vllm"
    model: str = ""
    served_model_name: str = ""
    workers: Annotated[int, msgspec.Meta(ge=1)] | None = None
    prefill_workers: Size = 0
    decode_workers: Size = 0
    role: Role = "both"
    tier: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{0,64}$")] = ""
    taint: tuple[Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")], ...] = ()
    native: tuple[str, ...] = ()
    connector: str = ""
    connector_options: dict[str, dict[str, Any]] = {}
    nixl_host: str = "127.0.0.1"
    nixl_port: Port = 0
    gpus_per_worker: Size = 0
    chat_template: str = ""
    model_aliases: tuple[str, ...] = ()
    logits_processors: dict[str, str] = {}
    allow_mixed_versions: YesNo = "no"
    allow_vulnerable_engine: YesNo = "no"
    local_prefill_tokens: Size = 256
    disaggregate: Literal["estimate", "always"] = "estimate"
    policy: str = "kv"
    router_temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    router_weights: tuple[str, ...] = ()
    busy_prefill_tokens: Size = 131_072
    busy_kv: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    busy_waiting: Size = 0
    queue_requests: Size = 4_096
    queue_tokens: Size = 33_554_432
    queue_tenant_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    queue_wait_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    queue_order: Literal["fcfs", "shortest_uncached"] = "fcfs"
    queue_ageing: Annotated[float, msgspec.Meta(gt=0)] = 4_096.0
    client_policies: tuple[str, ...] = CLIENT_POLICIES
    client_temperature_max: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    host: str = "127.0.0.1"
    port: Port = 8000
    name: str = ""
    pool: str = ""
    block_size: Size = 0
    max_model_len: Size = 0
    kv_cache_mib: Size = 0
    dtype: str = ""
    lora_sources: str = ""
    lora_networks: str = ""
    lora_on_demand: Literal["no", "yes"] = "no"
    lora_check_base: Literal["no", "yes"] = "yes"
    lora_max_mib: Annotated[int, msgspec.Meta(ge=1)] = 4096
    lora_cache_mib: Annotated[int, msgspec.Meta(ge=1)] = 65536
    lora_fetch_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    lora_load_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    sim_step_time: Literal["default", "zero"] = "default"
    sim_blocks: Annotated[int, msgspec.Meta(ge=16)] = 16384
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 15.0
    metrics_port: Port = 0
    canary_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    probe_idle_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    probe_s: Annotated[float, msgspec.Meta(gt=0)] = 20.0
    admin_host: str = "127.0.0.1"
    admin_port: Port = 0
    admin_token_file: str = ""
    record_payloads: PayloadKind = "off"
    body_bytes_max: Annotated[int, msgspec.Meta(ge=1024)] = BodyLimits().bytes_max
    bodies_bytes_max: Annotated[int, msgspec.Meta(ge=1024)] = BodyLimits().in_flight_bytes_max
    header_bytes_max: Annotated[int, msgspec.Meta(ge=1024)] = ConnectionLimits().header_bytes
    headers_max: Annotated[int, msgspec.Meta(ge=8)] = ConnectionLimits().headers
    header_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = ConnectionLimits().header_timeout_s
    body_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = ConnectionLimits().body_timeout_s
    connections_max: Annotated[int, msgspec.Meta(ge=1)] = ConnectionLimits().connections
    connections_per_address_max: Size = ConnectionLimits().per_address
    allow_special_tokens_in_text: YesNo = "no"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "text", "json"] = "auto"


LORA = (
    "lora_sources",
    "lora_networks",
    "lora_on_demand",
    "lora_check_base",
    "lora_max_mib",
    "lora_cache_mib",
    "lora_fetch_s",
    "lora_load_s",
)
"""Settings of workers, about adapters."""

ROUTING = ("policy", "router_temperature", "router_weights", "local_prefill_tokens", "disaggregate")
"""How a router chooses."""

QUEUE = (
    "busy_prefill_tokens",
    "busy_kv",
    "busy_waiting",
    "queue_requests",
    "queue_tokens",
    "queue_tenant_share",
    "queue_wait_s",
    "queue_order",
    "queue_ageing",
)
"""Settings of routers, about queries that wait."""

CLIENTS = ("client_policies", "client_temperature_max")
"""Settings of edges, about what clients may wish for."""

HTTP = (
    "body_bytes_max",
    "bodies_bytes_max",
    "header_bytes_max",
    "headers_max",
    "header_timeout_s",
    "body_timeout_s",
    "connections_max",
    "connections_per_address_max",
    "allow_special_tokens_in_text",
)
"""Settings of edges, about connections and what comes over them."""

ONLY_VLLM = (
    "connector",
    "connector_options",
    "nixl_host",
    "nixl_port",
    "gpus_per_worker",
    "kv_cache_mib",
    "dtype",
    "native",
    "logits_processors",
    "allow_mixed_versions",
    "allow_vulnerable_engine",
)
ONLY_SIM = ("sim_step_time", "sim_blocks")

NATS = (
    "nats",
    "nats_port",
    "nats_keys_dir",
    "nats_nkey_file",
    "nats_creds_file",
    "nats_tls_ca",
    "nats_tls_cert",
    "nats_tls_key",
    "nats_tls_first",
    "replicas",
)
"""Settings of every command that connects."""

LOG_SETTINGS = (*NATS, "namespace", "pool", "log_level", "log_format")
"""Settings of every command that reads a pool's log."""

REPEATED = ("taint",)
"""Flags that may be given several times."""


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name and equals and ":" in value):
        raise ValueError(f"{word!r} is not NAME=MODULE:CLASS")
    return name, value


_TYPES = get_type_hints(Settings, include_extras=True)
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "native": shlex.split,
    "taint": _words,
    "client_policies": _words,
    "router_weights": _words,
    "model_aliases": _words,
    "logits_processors": lambda text: dict(_pair(word) for word in _words(text)),
    "connector_options": msgspec.json.decode,
}


def cache_dir(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where caches go: as set, or as the XDG base directories say. None if there shall be none."""
    if settings.cache_dir:
        return None if settings.cache_dir == "none" else Path(settings.cache_dir)
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path there is invalid and ignored.
    if os.path.isabs(base):
        return Path(base) / "headwater"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "headwater" if os.path.isabs(home) else None


def add_flags(parser: ArgumentParser, names: tuple[str, ...]) -> None:
    """Flags for these settings, and --config."""
    parser.add_argument("--config", metavar="FILE", help="TOML or YAML file with settings by name")
    if "native" in names:
        parser.add_argument(
            "--config-key",
            metavar="KEY",
            help=f"table of that file with the engine's own arguments, as engines.prefill [{KEY_VARIABLE}]",
        )
    for name in names:
        kind = _TYPES[name]
        choices = get_args(kind) if get_origin(kind) is Literal else None
        parser.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            default=None,
            choices=choices,
            action="append" if name in REPEATED else "store",
            metavar=None if choices else name.rsplit("_", 1)[-1].upper(),
            help=f"{HELP[name]} [{ENV_PREFIX}{name.upper()}]",
        )


def resolve(flags: Namespace, environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from all sources. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    path = getattr(flags, "config", None) or environ.get(ENV_PREFIX + "CONFIG")
    key = getattr(flags, "config_key", None) or environ.get(KEY_VARIABLE)
    section: tuple[str, ...] = ()
    if key and not path:
        raise ConfigError(f"--config-key {key} says which table of a file to use: give --config FILE with it")
    if path:
        document = config_file.read(Path(path))
        if key:
            section = config_file.section(document, key, path)
        values |= _from_file(document, path, key or "")
    for name in _TYPES:
        text = environ.get(ENV_PREFIX + name.upper())
        if text is not None:
            values[name] = _convert(name, text, f"environment {ENV_PREFIX}{name.upper()}")
    for name in _TYPES:
        text = getattr(flags, name, None)
        if name in REPEATED and text is not None:
            text = ",".join(text)
        if text is not None:
            values[name] = _convert(name, text, "--" + name.replace("_", "-"))
    # The nearer to the one who types, the later: vLLM's parser lets the last word win.
    words = (*section, *values.get("native", ()), *native.with_model_flag(getattr(flags, "behind", ())))
    return Settings(**_lifted(values, words))


def check_engine(settings: Settings) -> None:
    """Refuse settings that the chosen engine does not use. Raises `ConfigError`."""
    foreign = {"sim": ONLY_VLLM, "vllm": ONLY_SIM}.get(settings.engine, ())
    defaults = Settings()
    for name in foreign:
        if getattr(settings, name) != getattr(defaults, name):
            flag = "--" + name.replace("_", "-")
            what = "the engine's own arguments (behind `--`)" if name == "native" else flag
            raise ConfigError(
                f"{what} [{ENV_PREFIX}{name.upper()}] is not used by --engine {settings.engine}: leave it out"
            )


def _lifted(values: dict[str, Any], words: tuple[str, ...]) -> dict[str, Any]:
    """Settings of ours that came as the engine's own arguments; both given must be the same."""
    lifted = dict(values)
    for name in ("model", "served_model_name", "chat_template"):
        theirs, ours = native.value(words, name), values.get(name)
        if ours and theirs and ours != theirs:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {ours} and, among the engine's own arguments, {flag} {theirs} say different things: leave one out"
            )
        if theirs:
            lifted[name] = theirs
    # vLLM's HTTP server has it, its engine has not.
    return lifted | {"native": native.without(words, "chat_template", takes_value=True)}


def _from_file(document: dict[str, Any], path: str, key: str) -> dict[str, Any]:
    # Tables that a key names hold an engine's arguments, for whichever process asks for them.
    tables = {config_file.SECTIONS, key.partition(".")[0]}
    settings = {name: value for name, value in document.items() if name not in tables}
    unknown = sorted(set(settings) - set(_TYPES))
    if unknown:
        raise ConfigError(f"{path}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(_TYPES))}")
    return {name: _convert(name, value, path) for name, value in settings.items()}


def _convert(name: str, value: Any, source: str) -> Any:
    try:
        if isinstance(value, str) and name in _FROM_TEXT:
            value = _FROM_TEXT[name](value)
        return msgspec.convert(value, _TYPES[name], strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{source}: {name} = {value!r} is not usable: {error}") from error
