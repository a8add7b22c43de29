"""`headwater models`: what a model's folder says about how to serve it."""

from typing import Annotated

import msgspec
from msgspec import Meta

from headwater.ops.config.command import Key, command, group
from headwater.ops.config.setting import Flag


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
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON")] = False,
) -> int:
    """Print the formats of a model's tool calls and reasoning, and why they were chosen, and what its chat template does not render."""
    from headwater.actors.edge.model.chat_template import ChatTemplate
    from headwater.actors.edge.model.template_form import changes_of
    from headwater.engines.model_files import read_model_files
    from headwater.ops.config.processes import EngineProcess
    from headwater.ops.config.worker import WorkerSettings
    from headwater.ops.model_download.source import with_folder
    from headwater.ops.worker import parsers
    from headwater.ops.worker.make_engine import model_folder

    # Weights say nothing about formats: the simulated engine needs none.
    wanted = WorkerSettings(engine="sim", model=model, model_revision=model_revision)
    worker = with_folder(EngineProcess(worker=wanted, cache_dir=cache_dir)).worker
    files = read_model_files(model_folder(worker.model))
    name = worker.served_model_name or files.name
    found = parsers.find(tool_parser, reasoning_parser, files)
    form = ChatTemplate(files.chat_template, files.special_tokens).form if files.chat_template else None
    changes = changes_of(form) if form is not None else []
    if as_json:
        document = {"model": name, **found._asdict(), "starts": found.starts, "template": changes}
        print(msgspec.json.encode(document).decode())
        return 0
    starts = {
        "prompt": "inside reasoning if the prompt ends there",
        "always": "inside reasoning",
        "never": "outside reasoning",
    }
    rows = (
        ("model", name),
        ("tool parser", f"{found.tool_format or 'none'} ({found.tool_reason})"),
        ("reasoning parser", f"{found.reasoning_format or 'none'} ({found.reasoning_reason})"),
        ("answers begin", starts[found.starts]),
        ("conversations", "; ".join(changes) or "are rendered as they are"),
    )
    for label, text in rows:
        print(f"{label:<17} {text}")
    return 0


models = group("models", None, inspect=inspect)
