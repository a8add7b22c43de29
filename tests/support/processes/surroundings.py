"""The surroundings of others: no home, nothing writable, a user without a name, closed streams, a deleted folder, few descriptors, …

`run` executes one Python process in them, which forks for each command (`surrounded`): what holds for an executed `headwater` holds for
each of them, and a command takes a tenth of a second.
"""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tests
from headwater.ops.start.children import child_environment
from tests.support.processes.commands import Ended

ROOT = Path(tests.__path__[0]).parent

USER = 54_321
"""A user without a name, a group and a home."""

READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro / && cd "$0" && exec "$@"'
"""Everything but the folder $0, for the program that follows and what it starts."""

CONTAINER = (
    'hostname "$1" && mount -t proc proc /proc && mount -t tmpfs -o mode=1777 tmpfs "$0" && mount -o remount,bind,ro / && cd / && ulimit -n 256 '
    '&& shift && exec "$@"'
)
"""A host name $1, process ids, 256 descriptors and a read-only root of its own, in which the folder $0 alone can be written."""

Variables = Mapping[Any, str | bytes | None]

NO_VARIABLES: Variables = {}


class Surrounding(NamedTuple):
    """What is odd about the place where a command runs.

    `environ`: variables to add, or to leave out where None. `prefix`: a program that runs the command. `closed`: standard streams that it
    starts without. `deleted`: its working folder is. `descriptors`: the most that it may have.
    """

    environ: Variables = NO_VARIABLES
    prefix: tuple[str, ...] = ()
    closed: tuple[int, ...] = ()
    deleted: bool = False
    descriptors: int = 0


class Line(NamedTuple):
    """A command line. With a `port` it serves there, and is told to end once it does."""

    words: Sequence[str]
    port: int = 0


def another_user() -> tuple[str, ...]:
    """A program that runs another as `USER`, which may read everything, as Python may lie in somebody's home, and own nothing."""
    who = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    return (*who, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")


def read_only(folder: Path) -> tuple[str, ...]:
    """A program that runs another where only `folder` can be written."""
    return ("unshare", "--mount", "sh", "-c", READ_ONLY, str(folder))


def container(folder: Path, host: str) -> tuple[str, ...]:
    """A program that runs another as process 1 of a container: read-only root, a user without a name, 256 descriptors.

    It has this machine's network, and an empty `folder` for temporary files.
    """
    own = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child")
    return (*own, "sh", "-c", CONTAINER, str(folder), host, *another_user())


@cache
def has_namespaces() -> bool:
    """May this process have mounts, a host name and process ids of its own, and become another user? Root may, in most containers."""
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    tried = subprocess.run(
        [
            "unshare",
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "sh",
            "-c",
            'mount -o remount,bind,ro / && exec "$@"',
            "sh",
            *another_user(),
            "true",
        ],
        capture_output=True,
        check=False,
    )
    return tried.returncode == 0


def environment(odd: Variables, folder: Path) -> dict[bytes, bytes]:
    """The environment of a command: what it needs to find Python and Headwater, and what is odd."""
    made = {os.fsencode(name): os.fsencode(text) for name, text in child_environment().items()}
    made[b"PYTHONPATH"] = os.fsencode(os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    made[b"TMPDIR"] = os.fsencode(folder)
    for name, text in odd.items():
        made.pop(os.fsencode(name), None)
        if text is not None:
            made[os.fsencode(name)] = os.fsencode(text)
    return made


async def run(
    surrounding: Surrounding, lines: Sequence[Line], folder: Path, within_s: float = 90
) -> list[Ended]:
    """Run commands one after the other in a surrounding, with `folder`, which anybody may write, as their working folder."""
    folder.chmod(0o777)
    where = folder / "gone" if surrounding.deleted else folder
    where.mkdir(exist_ok=True)
    read, write = os.pipe()

    def enter() -> None:
        if surrounding.deleted:
            os.rmdir(where)
        if surrounding.descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (surrounding.descriptors, surrounding.descriptors))
        for descriptor in surrounding.closed:
            os.close(descriptor)

    process = await asyncio.create_subprocess_exec(
        *surrounding.prefix,
        sys.executable,
        "-m",
        "tests.support.processes.surrounded",
        str(write),
        json.dumps(surrounding.closed),
        json.dumps(lines),
        cwd=where,
        env=environment(surrounding.environ, folder),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=[write],
        start_new_session=True,
        preexec_fn=enter,
    )
    os.close(write)
    ends: list[Ended] = []
    with os.fdopen(read, "rb", buffering=0) as pipe:
        reader = asyncio.StreamReader(limit=1 << 24)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            async with asyncio.timeout(within_s):
                async for line in reader:
                    ends.append(Ended(*json.loads(line)))
                await process.wait()
        except TimeoutError as error:
            raise AssertionError(f"{lines[len(ends)].words} still runs after {within_s:g} s") from error
        finally:
            transport.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert len(ends) == len(lines), f"ended with {process.returncode} in {lines[len(ends)].words}"
    return ends
