"""The command line: how it is read and run, and its errors."""

import contextlib
import difflib
import errno
import inspect
import os
import sys
from collections.abc import Coroutine, Sequence
from importlib import import_module
from typing import Any, cast

from cyclopts import App, CycloptsError, Group, UnknownCommandError, UnusedCliTokensError

from headwater import __version__
from headwater.ops.commands import COMMANDS, place_of
from headwater.ops.config import sources as config_sources
from headwater.ops.config.command import Bound
from headwater.ops.config.setting import ConfigError
from headwater.ops.config.sources import Sources
from headwater.ops.start import system

SHOW = ["config", "show"]
"""The command whose arguments are another command's line."""


def application(
    sources: Sources | None = None, *, needed: str | None = None, words: Sequence[str] = ()
) -> App:
    """The whole command line.

    Only the module of the command `needed` is imported, "" for none; without it all are. With `words` it has the settings that these give;
    commands of a group have all of theirs.
    """
    top = App(
        name="headwater",
        help="Serve LLMs from a fleet of engines.",
        help_format="plaintext",
        version=__version__,
        config=[sources or Sources()],
        result_action="return_value",
    )
    options = Group("Options", sort_key=-1)
    for flag in ("--help", "--version"):
        top[flag].group = options
    for number, (package, (title, commands)) in enumerate(COMMANDS.items()):
        group = Group(title, sort_key=number)
        for position, (name, text) in enumerate(commands.items()):
            module, attribute = place_of(package, name)
            if needed in (None, name):
                found = getattr(import_module(module), attribute)
                if isinstance(found, App):
                    found.group, found.sort_key = (group,), position
                    top.command(found)
                else:
                    command = found.for_line(words) if words else found
                    top.command(command, name=name, group=group, sort_key=position)
            else:
                top.command(f"{module}:{attribute}", name=name, help=text, group=group, sort_key=position)
    return top


def parse(line: Sequence[str]) -> tuple[Bound, Sources]:
    """Return what a command line means. Raises `ConfigError`; `--help` and `--version` print and end the process."""
    words, native = (list(line), []) if list(line[:2]) == SHOW else _split(line)
    with contextlib.suppress(CycloptsError):
        return _parse(words, Sources(native), words)
    # What is wrong is said by the parser that knows every flag.
    try:
        return _parse(words, Sources(native), ())
    except CycloptsError as error:
        raise ConfigError(_message(error)) from error


def _parse(words: list[str], sources: Sources, given: Sequence[str]) -> tuple[Bound, Sources]:
    top = application(sources, needed=words[0] if words else "", words=given)
    command, bound, _ = top.parse_args(
        words, exit_on_error=False, print_error=False, end_of_options_delimiter=""
    )
    found = command(*bound.args, **bound.kwargs)
    if not isinstance(found, Bound):
        # Help or the version was printed.
        raise SystemExit(0)
    return found, sources


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our words, and those of the engine after `--`."""
    if "--" not in words:
        return list(words), []
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def _message(error: CycloptsError) -> str:
    """One line that names the flag and what to do."""
    if isinstance(error.__cause__, ConfigError):
        return str(error.__cause__)
    if isinstance(error, UnknownCommandError):
        return _unknown_command(error)
    text = " ".join(str(error).split())
    if isinstance(error, UnusedCliTokensError):
        text = f"unexpected argument {error.unused_tokens[0] if error.unused_tokens else ''}"
    return text


def _unknown_command(error: UnknownCommandError) -> str:
    """Names the commands of the group that was named, or all."""
    above = error.command_chain or ()
    word = (error.unused_tokens or [""])[0]
    if above and error.app is not None:
        names = [name for name in error.app if not name.startswith("-")]
    else:
        names = [name for _, commands in COMMANDS.values() for name in commands]
    near = difflib.get_close_matches(word, names, n=1)
    fix = f"did you mean {near[0]}?" if near else f"commands are {', '.join(names)}"
    return f"there is no command {' '.join((*above, word))!r}: {fix}"


def main(line: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's.

    What a user can fix is one line on standard error and exit code 2.
    """
    open_standard_streams()
    system.raise_limit()
    try:
        bound, _ = parse(sys.argv[1:] if line is None else line)
        if bound.log is not None:
            from headwater.engines import logs

            logs.configure(bound.log.level, bound.log.format, kind=bound.function.__name__)
        _warn_of_variables()
        code = _run(bound)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        # Before an event loop runs, which handles signals in order.
        return 130
    except BrokenPipeError:
        # The reader is gone: what is left in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        where = error.filename or "the output"
        _say(f"cannot write to {where}: {error.strerror}", failed=True)
        return 2
    except Exception as error:
        interruption = sys.modules.get("headwater.engines.process")
        if interruption is not None and isinstance(error, interruption.EngineInterrupted):
            return int(128 + error.number)
        if isinstance(error, _user_errors()):
            _say(str(error), failed=True)
            return 2
        raise


def _run(bound: Bound) -> int:
    if inspect.iscoroutinefunction(bound.function):
        from headwater.ops.start import signals

        # The coroutine is made within the loop: a signal before leaves none that was never awaited.
        return signals.run_command(lambda: cast("Coroutine[Any, Any, int]", bound.run()))
    result = bound.run()
    if isinstance(result, int):
        return result
    from headwater.ops.start import signals

    return signals.run(result) if callable(result) else signals.run_command(lambda: result)


def open_standard_streams() -> None:
    """Open those that this process was started without, and let none fail on a character that its encoding lacks.

    A file that is opened next would else get the number of one of them, and what a library prints.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (as long as the process)
        stream = getattr(sys, name)
        if mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _warn_of_variables() -> None:
    for name, meant in config_sources.unknown(os.environ):
        hint = f": did you mean {meant}?" if meant else "; `headwater config reference` lists all settings"
        _say(f"no setting has the variable {name}, which is ignored{hint}")


def _say(text: str, *, failed: bool = False) -> None:
    """See `headwater.engines.logs.say`, which is not imported for a command line that is wrong."""
    logs = sys.modules.get("headwater.engines.logs")
    if logs is not None:
        logs.say(text, failed=failed)
    else:
        print(f"headwater: {text}", file=sys.stderr, flush=True)


def _user_errors() -> tuple[type[Exception], ...]:
    """Return what a user can fix. Modules that were not imported cannot have raised."""
    places = {
        "headwater.ops.config.setting": "ConfigError",
        "headwater.engines.engine": "EngineError",
        "headwater.events.ports": "LogError",
        "headwater.ops.nats.server": "ServerUnavailable",
        "headwater.schemas.names": "InvalidName",
    }
    return tuple(getattr(import_module(name), kind) for name, kind in places.items() if name in sys.modules)
