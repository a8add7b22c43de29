"""Extracts only an adapter's two files from an archive. Runs in a thread."""

import tarfile
import zipfile
import zlib
from collections.abc import Generator
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import IO

from headwater.engines.lora_files.budget import Budget
from headwater.engines.lora_files.errors import LoraError
from headwater.engines.lora_files.peft import CHUNK_BYTES, FILES

MEMBERS_MAX = 10_000


def unpack(archive: Path, into: Path, budget: Budget, source: str) -> list[str]:
    """Extract `FILES` from any folder of the archive; returns the names of all members.

    Raises `LoraError` for a name outside the archive's folder, for two adapters in one archive, for links instead of
    files, and beyond the budget, which also counts members before the files.
    """
    names: list[str] = []
    home: PurePosixPath | None = None
    try:
        with closing(_members(archive, budget)) as members:
            for name, stream in members:
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
                    raise LoraError(400, f"{source} contains {name!r}, which is outside its folder: rejected")
                names.append(path.name)
                if len(names) > MEMBERS_MAX:
                    raise LoraError(400, f"{source} contains more than {MEMBERS_MAX} files")
                if path.name not in FILES:
                    continue
                if stream is None:
                    raise LoraError(400, f"{source}: {name} is a link or a device, not a file")
                if home not in (None, path.parent) or (into / path.name).exists():
                    raise LoraError(400, f"{source} contains more than one adapter")
                home = path.parent
                with (into / path.name).open("xb") as file:
                    while chunk := stream.read(CHUNK_BYTES):
                        budget.spend(len(chunk))
                        file.write(chunk)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        # zipfile raises RuntimeError for a required password or an unknown compression method.
        raise LoraError(400, f"{source} cannot be unpacked: {error}") from error
    return names


def _members(archive: Path, budget: Budget) -> Generator[tuple[str, IO[bytes] | None], None, None]:
    """Name and content of every member except folders; None for members that are not regular files."""
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
                # Skipped members are decompressed as well.
                budget.spend(member.size)
            if not member.isdir():
                yield member.name, tape.extractfile(member) if member.isreg() else None
