"""`headwater ctl`: control of workers."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.processes import ClientSettings
from headwater.ops.config.setting import Flag
from headwater.schemas.messages.control import COMMANDS

NOTES = "\n".join(
    (
        "Commands:",
        "",
        *(f"  {name:14} {text}" for name, text in COMMANDS.items()),
        "",
        "For example:",
        "",
        "  headwater ctl list",
        "  headwater ctl worker-0 sleep --level 1",
        "  headwater ctl worker-0 load-lora NAME SOURCE",
        "  headwater ctl worker-0 role prefill",
        "  headwater ctl worker-0 taint batch",
        "  headwater ctl --all drain",
        "",
        "Engine weights are the shares of a model's new requests that its engines get:",
        "",
        "  headwater ctl weights MODEL                            show them",
        "  headwater ctl weights MODEL vllm=0.95 sglang=0.05      set them; an engine without one gets none",
        "  headwater ctl weights MODEL remove                     remove them: any worker may get any request",
    )
)


@command(defaults={"log.level": "warning"}, notes=NOTES)
def ctl(
    *words: Annotated[
        str,
        Meta(
            description="WORKER COMMAND [ARGUMENT…], COMMAND [ARGUMENT…] with --all, list, "
            "or weights MODEL [ENGINE=WEIGHT… | remove]"
        ),
    ],
    everyone: Annotated[bool, Flag("all"), Meta(description="every worker that has a lease")] = False,
    level: Annotated[
        int | None, Meta(description="sleep: 1 keeps the weights in host memory, 2 discards them")
    ] = None,
    mode: Annotated[str | None, Meta(description="pause: abort, wait or keep in-flight requests")] = None,
    drain_timeout: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="sleep, pause, drain, stop: seconds that in-flight requests have to finish; then they migrate",
        ),
    ] = None,
    forget: Annotated[
        bool, Meta(description="unload-lora: on all workers, so that no request loads it again")
    ] = False,
    by: Annotated[str, Meta(description="name for the audit log (default: user@host)")] = "",
    timeout: Annotated[float, Meta(gt=0, description="seconds to wait for completion")] = 900.0,
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON, one line per worker")] = False,
    settings: ClientSettings,
) -> int:
    """Control workers: drain, sleep, wake, role, adapters, …"""
    from headwater.ops.operator import ctl as control
    from headwater.ops.operator import engine_weights
    from headwater.ops.process import signals

    if words[:1] == ("weights",) and not everyone:
        by = by or control.whoami()
        return signals.run_command(
            lambda: engine_weights.weigh(settings.nats, words[1:], by, as_json=as_json)
        )
    given = {"level": level, "mode": mode, "within_s": drain_timeout, "forget": forget or None}
    call = control.ControlCall(words, given, everyone, by, timeout, as_json)
    return signals.run_command(lambda: control.ctl(settings.nats, call))
