"""`headwater check-engine`: the contract of an engine, checked."""

from typing import Annotated, Any

from msgspec import Meta

from headwater.ops.config.command import Key, command
from headwater.ops.config.setting import Flag


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
    from headwater.ops.worker import conformance

    worker = WorkerSettings(
        engine,
        model,
        block_size=block_size,
        max_model_len=max_model_len,
        engine_options=engine_options,
    )
    return conformance.run(worker, lora_adapters, as_json=as_json)
