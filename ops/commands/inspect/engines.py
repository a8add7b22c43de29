"""`headwater engines`: the engines that `--engine` may name here."""

from typing import Annotated

import msgspec
from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.setting import Flag


@command
def engines(
    *more: Annotated[
        str,
        Flag("ENGINE"),
        Meta(description="list these too: files (echo.py) or classes (package.module:Echo)"),
    ],
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON")] = False,
) -> int:
    """List the engines that can be chosen, with versions and capabilities."""
    from headwater.ops.worker import catalog

    found = catalog.catalog(more)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(catalog.as_data(found))).decode())
    else:
        print(catalog.as_table(found))
    return 1 if any(one.problem for one in found) else 0
