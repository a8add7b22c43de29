"""`headwater completion`: completion of commands and flags in a shell."""

from typing import Annotated, Literal

from msgspec import Meta

from headwater.ops.config.command import command


@command
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Meta(description="the shell")], /) -> int:
    """Print a completion script for a shell.

    bash: source <(headwater completion bash). zsh: save it as _headwater in a folder of $fpath. fish: save it as
    ~/.config/fish/completions/headwater.fish.
    """
    from headwater.ops.commands.application import application

    print(application().generate_completion(shell=shell))
    return 0
