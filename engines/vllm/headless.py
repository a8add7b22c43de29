"""vLLM processes without requests of their own: data-parallel ranks (`--headless`) and further nodes of an engine.

Their leader is a worker elsewhere, which represents them in the fleet: they do not join it, and only compute and export
metrics.
"""

from typing import Any

from headwater.engines.engine import EngineUnavailable, start_failure
from headwater.engines.process import EngineInterrupted, interruptible
from headwater.engines.vllm import config, connectors
from headwater.engines.vllm.config import VllmSettings, environment, shared_arguments


def words(settings: VllmSettings, transfer: str = "", *, cpu: bool = False) -> tuple[str, ...]:
    """All arguments as words of vLLM's command line, Headwater's first. `transfer` is KVTransferConfig in JSON."""
    made: dict[str, Any] = {"model": settings.model}
    for name, value in shared_arguments(settings, cpu=cpu).items():
        if not config.has(settings.native, name):
            made[name] = value
    if transfer:
        made["kv_transfer_config"] = transfer
    rest = config.without(settings.native, "headless", takes_value=False)
    rest = config.without(rest, "model", takes_value=True)
    return (*config.tokens_of(made, "settings"), "--headless", *rest)


def run(settings: VllmSettings) -> None:
    """Run until SIGTERM, SIGINT or SIGHUP, or until the leader ends. Raises `EngineUnavailable`."""
    import json

    try:
        from vllm.entrypoints.cli.serve import run_headless
        from vllm.platforms import current_platform
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        make_arg_parser = _front_parser()
    except ImportError as error:
        raise EngineUnavailable(f"this vLLM cannot run headless: {error}") from error
    # Its errors name the argument; the parser below would end the process with its help text.
    config.parse(config.without(settings.native, "headless", takes_value=False))
    cpu = bool(current_platform.is_cpu())
    transfer = connectors.transfer_config(settings.connectors, settings.connector_options, cpu=cpu)
    environment(settings)
    parser = make_arg_parser(FlexibleArgumentParser(prog="headwater engine vllm --"))
    arguments = parser.parse_args(list(words(settings, json.dumps(transfer) if transfer else "", cpu=cpu)))
    arguments.api_server_count = 0
    try:
        # It handles SIGTERM and SIGINT itself once it has read its configuration, and SIGHUP never.
        with interruptible():
            run_headless(arguments)
    except EngineInterrupted:
        return
    except Exception as error:  # whatever vLLM raises
        raise start_failure("vLLM cannot run headless", error) from error


def _front_parser() -> Any:
    """`make_arg_parser`, where this release has it."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser
