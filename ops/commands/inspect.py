"""Commands that show what a pool's log contains, and which engines and models are here."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headwater.ops.config.command import AnyWord, Json, Key, Process, command, group
from headwater.ops.config.processes import PoolReader
from headwater.ops.config.setting import ConfigError, Flag


@command
async def explain(
    request: Annotated[str, Meta(description="request id, as in the header x-request-id")],
    /,
    *,
    every: Annotated[
        bool,
        Flag("all"),
        Meta(
            description="show every candidate: recomputes from the log what a decision of a large fleet does not keep"
        ),
    ] = False,
    as_json: Annotated[
        bool,
        Flag("json"),
        Meta(description="print JSON: decisions with candidates, and the request's events"),
    ] = False,
    settings: PoolReader,
) -> int:
    """Explain the routing decisions of a request: what each worker would have cost, and which was chosen."""
    from headwater.ops.operator import explain as operator

    return await operator.explain(settings.nats, settings.pool, request, every=every, as_json=as_json)


@command(
    notes="Exit status: 0, or 1 if the log has nothing of the request, or the receiver did not take the trace."
)
async def trace(
    request: Annotated[str, Meta(description="request id, as in the header x-request-id")],
    /,
    *,
    otlp: Annotated[str, Key("trace.otlp")],
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON: the spans")] = False,
    settings: PoolReader,
) -> int:
    """Show a request that the log holds as the spans of a trace, or send them to a receiver (--otlp)."""
    from headwater.ops.config.sections import receiver_of
    from headwater.ops.operator import trace as operator_trace

    receiver = receiver_of(otlp) if otlp else None
    return await operator_trace.trace(settings.nats, settings.pool, request, receiver, as_json=as_json)


@command
def open(
    file: Annotated[str, Meta(description="file of `headwater capture`")],
    /,
    *,
    host: Annotated[str, Key("console.host")],
    port: Annotated[int, Key("console.port")],
) -> Process:
    """Show a capture in the console, on this machine and without NATS."""
    from headwater.ops.config.sections import ConsoleSettings
    from headwater.ops.console import process

    console_settings = ConsoleSettings(host, port)
    return lambda stop: process.open_capture(file, console_settings, stop)


@command
async def log(
    settings: PoolReader,
    *,
    requests: Annotated[bool, Meta(description="summarise the request log instead")] = False,
    audit: Annotated[bool, Meta(description="list control commands and their senders instead")] = False,
    as_json: Annotated[
        bool, Flag("json"), Meta(description="print JSON (with --audit: one line each)")
    ] = False,
) -> int:
    """Summarise a pool's log: events by type and writer."""
    from headwater.ops.operator import log as operator

    if as_json and not audit:
        raise ConfigError("--json is for --audit: give both")
    return await operator.show_log(
        settings.nats, settings.pool, audit=audit, requests=requests, as_json=as_json
    )


@command
async def tree(
    settings: PoolReader,
    *,
    worker: Annotated[str, Meta(description="only blocks that this worker caches, and their ancestors")] = "",
    depth: Annotated[int, Meta(description="only runs that begin before block N of a prompt; -1: all")] = -1,
    limit: Annotated[int, Meta(ge=1, description="maximum number of runs, the largest first")] = 50,
    as_json: Json = False,
) -> int:
    """Show the blocks cached by a pool's workers, as a tree of prefixes."""
    from headwater.ops.operator import log as operator

    return await operator.show_tree(
        settings.nats, settings.pool, worker=worker, depth=depth, limit=limit, as_json=as_json
    )


@command
async def replay(
    settings: PoolReader,
    *,
    verify: Annotated[bool, Meta(description="recompute every decision and compare")] = False,
    bookmark: Annotated[
        str, Flag("from"), Meta(description="start from the snapshot with this bookmark")
    ] = "",
    until: Annotated[
        str,
        AnyWord(),
        Meta(
            description="end at this position, or at this time: ISO 8601, HH:MM[:SS] of today, milliseconds since 1970, or -5m"
        ),
    ] = "",
    into: Annotated[
        str,
        Meta(
            description="send the recorded requests to this endpoint, or to a simulated fleet like the recorded one (sim), with made-up "
            "prompts of the same lengths and common beginnings"
        ),
    ] = "",
    api_key_file: Annotated[str, Meta(description="with --into: file with an API key of the endpoint")] = "",
    speed: Annotated[float, Meta(gt=0, description="with --into: times as fast as they arrived")] = 1.0,
    as_json: Json = False,
) -> int:
    """Fold a pool's log again, and verify its decisions; or send its requests again.

    Exit codes: 0 if the log was folded and all decisions that can be recomputed are equal; 1 if one is not, or if the log's
    start is gone and no snapshot continues it, or if with --into a request failed; 2 if something given is wrong or the log is out of reach.
    """
    from headwater.ops.operator import replay as operator

    if into:
        from headwater.ops.whatif import replay_into

        if verify or bookmark or until:
            raise ConfigError("--into sends requests, and goes without --verify, --from and --until")
        return await replay_into.replay_into(
            settings.nats, settings.pool, into, speed, key_file=api_key_file, as_json=as_json
        )
    if speed != 1.0:
        raise ConfigError("--speed is for --into: give both")
    return await operator.replay(
        settings.nats, settings.pool, verify=verify, bookmark=bookmark, until=until, as_json=as_json
    )


@command
async def snapshots(
    settings: PoolReader,
    *,
    bookmark: Annotated[str, Meta(description="keep a snapshot permanently under this name")] = "",
    position: Annotated[
        int | None, Meta(description="position of the snapshot for --bookmark (default: the newest)")
    ] = None,
    drop: Annotated[str, Meta(description="delete a bookmark")] = "",
    as_json: Json = False,
) -> int:
    """List a pool's snapshots, or bookmark one."""
    from headwater.ops.operator import log as operator

    if bookmark and drop:
        raise ConfigError("--bookmark and --drop exclude each other: give one")
    if as_json and (bookmark or drop):
        raise ConfigError("--json is for the list: give it without --bookmark and --drop")
    if position is not None and not bookmark:
        raise ConfigError("--position is for --bookmark: give both")
    return await operator.snapshots(
        settings.nats, settings.pool, bookmark=bookmark, position=position, drop=drop, as_json=as_json
    )


@command
async def capture(
    settings: PoolReader,
    *,
    around: Annotated[
        str,
        AnyWord(),
        Meta(
            description="the id of a request, or a time: ISO 8601, HH:MM[:SS] of today, seconds or milliseconds since 1970, or -5m"
        ),
    ],
    output: Annotated[str, Flag("output", "o"), Meta(description="file to write, such as incident.hwc")],
    minutes: Annotated[
        float, Meta(gt=0, le=1440, description="minutes to capture: half of them before and half after it")
    ] = 5.0,
    with_contents: Annotated[
        bool, Meta(description="keep prompts and answers that were recorded (--record-payloads full)")
    ] = False,
    data_dir: Annotated[str, Key("data_dir")],
    as_json: Annotated[
        bool, Flag("json"), Meta(description="print JSON: what the file has, as its capture.json")
    ] = False,
) -> int:
    """Write what the logs have around a request or a time into one file, which other commands read with --file."""
    from pathlib import Path

    from headwater.ops.operator import capture as operator

    order = operator.Order(around, minutes, Path(output), with_contents, Path(data_dir))
    return await operator.capture(settings.nats, settings.pool, order, as_json=as_json)


@command
def engines(
    *more: Annotated[
        str,
        Flag("ENGINE"),
        Meta(description="list these too: files (echo.py) or classes (package.module:Echo)"),
    ],
    as_json: Json = False,
) -> int:
    """List the engines that can be chosen, with versions and capabilities."""
    from headwater.ops.start import engines

    entries = engines.catalog(more)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(engines.as_data(entries))).decode())
    else:
        print(engines.as_table(entries))
    return 1 if any(entry.problem for entry in entries) else 0


@command
def check_engine(
    engine_name: Annotated[str | None, Flag("ENGINE"), Meta(description="the same as --engine")] = None,
    /,
    *,
    engine: Annotated[str, Key("worker.engine")],
    model: Annotated[str, Key("worker.model")],
    block_size: Annotated[int, Key("worker.block_size")],
    max_model_len: Annotated[int, Key("worker.max_model_len")],
    engine_options: Annotated[dict[str, Any], Key("worker.engine_options")],
    lora_adapters: Annotated[
        tuple[str, ...],
        Flag("lora-adapter"),
        Meta(
            description="folder of an adapter in PEFT's layout, for the checks of LoRA; give two; "
            "without them the engine gets names only"
        ),
    ] = (),
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON, a line per check")] = False,
) -> int:
    """Check an engine against the contract: each check passes, fails, or needs a capability that the engine does not declare."""
    from headwater.ops.config.worker import WorkerSettings
    from headwater.ops.start import engines

    worker = WorkerSettings(
        engine,
        model,
        block_size=block_size,
        max_model_len=max_model_len,
        engine_options=engine_options,
    )
    return engines.check_engine(worker, lora_adapters, as_json=as_json)


@command
def inspect(
    model: Annotated[
        str, Meta(description="model: a folder in Hugging Face's layout, ORG/NAME of a hub, or a URL")
    ],
    /,
    *,
    cache_dir: Annotated[str, Key("cache_dir")],
    model_revision: Annotated[str, Key("worker.model_revision")],
    tool_parser: Annotated[
        str, Meta(description="as for workers: this format in place of the detected one")
    ] = "",
    reasoning_parser: Annotated[str, Meta(description="as for workers, likewise")] = "",
    as_json: Json = False,
) -> int:
    """Print the formats of a model's tool calls and reasoning, and why they were chosen, and what its chat template does not render."""
    from headwater.actors.edge.chat_template import ChatTemplate
    from headwater.actors.edge.template_form import changes_of
    from headwater.engines.model_files import read_model_files
    from headwater.ops.config.processes import EngineProcess
    from headwater.ops.config.worker import WorkerSettings
    from headwater.ops.start import model as start_model
    from headwater.ops.start.model_source import with_folder
    from headwater.ops.start.plan import model_folder

    worker_settings = WorkerSettings(model=model, model_revision=model_revision)
    # Weights say nothing about formats.
    worker = with_folder(EngineProcess(worker=worker_settings, cache_dir=cache_dir), weights=False).worker
    files = read_model_files(model_folder(worker.model))
    name = worker.served_model_name or files.name
    formats = start_model.find(tool_parser, reasoning_parser, files)
    form = ChatTemplate(files.chat_template, files.special_tokens).form if files.chat_template else None
    changes = changes_of(form) if form is not None else []
    if as_json:
        document = {"model": name, **formats._asdict(), "starts": formats.starts, "template": changes}
        print(msgspec.json.encode(document).decode())
        return 0
    starts = {
        "prompt": "inside reasoning if the prompt ends there",
        "always": "inside reasoning",
        "never": "outside reasoning",
    }
    rows = (
        ("model", name),
        ("tool parser", f"{formats.tool_format or 'none'} ({formats.tool_reason})"),
        ("reasoning parser", f"{formats.reasoning_format or 'none'} ({formats.reasoning_reason})"),
        ("answers begin", starts[formats.starts]),
        ("conversations", "; ".join(changes) or "are rendered as they are"),
    )
    for label, text in rows:
        print(f"{label:<17} {text}")
    return 0


models = group("models", None, inspect=inspect)
