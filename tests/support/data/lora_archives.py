"""Archives of adapters, and what a cache of them holds."""

import io
import tarfile
import zipfile
from pathlib import Path

PICKLE = b"\x80\x04\x95never to be loaded"


def kept(cache_of: Path) -> list[str]:
    """Names in the cache, leftovers included."""
    return sorted(path.name for path in (cache_of / "cache").iterdir())


def archive_of(path: Path, members: dict[str, bytes]) -> Path:
    """A .zip or .tar.gz with these members."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, data in members.items():
                packed.writestr(name, data)
    else:
        with tarfile.open(path, "w:gz") as tape:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tape.addfile(info, io.BytesIO(data))
    return path
