"""Unpacking an adapter's two files from an archive, and nothing else. Runs in a thread."""

import tarfile
import zipfile
import zlib
from collections.abc import Generator
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import IO

from headwater.engines.adapter_files.budget import Budget
from headwater.engines.adapter_files.errors import AdapterError
from headwater.engines.adapter_files.peft import CHUNK_BYTES, FILES

MEMBERS_MAX = 10_000


def unpack(archive: Path, into: Path, budget: Budget, source: str) -> list[str]:
    """Unpack `FILES` from wherever in the archive they lie; returns the names of everything in it.

    Raises `AdapterError`: for a name that leaves the archive's folder, for two adapters in one archive, for links
    in the place of files, and past the budget, which counts what lies before the files as well.
    """
    names: list[str] = []
    home: PurePosixPath | None = None
    try:
        with closing(_members(archive, budget)) as members:
            for name, stream in members:
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
                    raise AdapterError(400, f"{source} holds {name!r}, which leaves its folder: refused")
                names.append(path.name)
                if len(names) > MEMBERS_MAX:
                    raise AdapterError(400, f"{source} holds more than {MEMBERS_MAX} files")
                if path.name not in FILES:
                    continue
                if stream is None:
                    raise AdapterError(400, f"{source}: {name} is a link or a device, not a file")
                if home not in (None, path.parent) or (into / path.name).exists():
                    raise AdapterError(400, f"{source} holds more than one adapter")
                home = path.parent
                with (into / path.name).open("xb") as file:
                    while chunk := stream.read(CHUNK_BYTES):
                        budget.spend(len(chunk))
                        file.write(chunk)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        # A RuntimeError is how zipfile says that a password is wanted, or a method that it does not know.
        raise AdapterError(400, f"{source} can not be unpacked: {error}") from error
    return names


def _members(archive: Path, budget: Budget) -> Generator[tuple[str, IO[bytes] | None], None, None]:
    """Name and content of every member but folders; None for what is no plain file."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                link = info.external_attr >> 16 & 0o170000 not in (0, 0o100000)
                if info.is_dir():
                    continue
                if link:
                    yield info.filename, None
                    continue
                with packed.open(info) as stream:
                    yield info.filename, stream
        return
    with tarfile.open(archive, "r:*") as tape:
        for member in tape:
            if PurePosixPath(member.name).name not in FILES:
                # Passed over, it is unpacked all the same.
                budget.spend(member.size)
            if not member.isdir():
                yield member.name, tape.extractfile(member) if member.isreg() else None
