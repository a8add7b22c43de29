"""Origins of LoRA files: a folder, a bucket, a hub (HTTP has its own module)."""

import asyncio
import os
import shutil
import stat
from pathlib import Path
from typing import Any, Protocol

from headwater.engines.engine import EngineUnavailable
from headwater.engines.lora_files.budget import Budget
from headwater.engines.lora_files.errors import LoraError, SourceMissing
from headwater.engines.lora_files.http import HttpOrigin
from headwater.engines.lora_files.peft import CHUNK_BYTES
from headwater.engines.lora_files.policy import LoraPolicy, Source


class Origin(Protocol):
    """One source."""

    async def save(self, name: str, to: Path, budget: Budget) -> None:
        """Write the file `name` of the adapter to `to`, which must not exist; "" is the source itself.

        Raises `SourceMissing` where there is none, `LoraError` for other errors.
        """
        ...

    async def names(self) -> list[str]:
        """Names of all files, where they can be listed, for error messages. Never fails."""
        ...


def origin(source: Source, policy: LoraPolicy) -> Origin:
    """The reader of a source that `policy` admitted. Raises `EngineUnavailable` naming a missing package."""
    match source.scheme:
        case "file":
            return FolderOrigin(source, policy)
        case "s3":
            return BucketOrigin(source)
        case "hf":
            return HubOrigin(source)
        case _:
            return HttpOrigin(source, policy)


class FolderOrigin:
    """A local folder, or one that all machines mount."""

    def __init__(self, source: Source, policy: LoraPolicy) -> None:
        self._path = Path(source.path)
        self._policy = policy

    async def save(self, name: str, to: Path, budget: Budget) -> None:
        """See `Origin.save`. A link may not lead out of the allowed folders."""
        path = self._path / name if name else self._path
        # Links are resolved and checked again: the folder's files may be links themselves.
        self._policy.admit(str(path.resolve()))
        await asyncio.to_thread(_copy, path, to, budget)

    async def names(self) -> list[str]:
        """See `Origin.names`."""
        return os.listdir(self._path) if self._path.is_dir() else []


class BucketOrigin:
    """Objects of an S3 bucket. Keys and endpoint come from AWS's own environment variables."""

    def __init__(self, source: Source) -> None:
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError as error:
            raise EngineUnavailable("adapters on S3 need obstore: pip install 'headwater[lora]'") from error
        self._obstore: Any = obstore
        self._source = source
        self._store: Any = S3Store(source.host)

    async def save(self, name: str, to: Path, budget: Budget) -> None:
        """See `Origin.save`."""
        key = "/".join(part for part in (self._source.path.strip("/"), name) if part)
        try:
            result = await self._obstore.get_async(self._store, key)
            with to.open("xb") as file:
                async for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                    budget.spend(len(chunk))
                    file.write(chunk)
        except FileNotFoundError as error:
            raise SourceMissing(f"s3://{self._source.host}/{key}") from error
        except self._obstore.exceptions.BaseError as error:
            raise LoraError(502, f"s3://{self._source.host}/{key}: {error}") from error

    async def names(self) -> list[str]:
        """See `Origin.names`: listing a bucket requires another permission than reading it."""
        return []


class HubOrigin:
    """A repository of a Hugging Face hub. Token and endpoint come from its library's own settings."""

    def __init__(self, source: Source) -> None:
        try:
            import huggingface_hub
            from huggingface_hub import errors
        except ImportError as error:
            raise EngineUnavailable(
                "adapters of a hub need huggingface_hub: pip install 'headwater[lora]'"
            ) from error
        self._hub: Any = huggingface_hub
        self._errors: Any = errors
        name, _, revision = source.path.partition("/@")
        self._source = source
        self._repository = f"{source.host}/{name}"
        self._revision = revision or None

    async def save(self, name: str, to: Path, budget: Budget) -> None:
        """See `Origin.save`. The size is requested first, as the library reads a whole file."""
        await asyncio.to_thread(self._save, name, to, budget)

    def _save(self, name: str, to: Path, budget: Budget) -> None:
        hub, errors = self._hub, self._errors
        folder = to.parent / ".hub"
        try:
            url = hub.hf_hub_url(self._repository, name, revision=self._revision)
            size = hub.get_hf_file_metadata(url).size
            budget.spend(size or 0)
            got = hub.hf_hub_download(self._repository, name, revision=self._revision, local_dir=str(folder))
            if os.path.getsize(got) != size:
                raise LoraError(502, f"{self._source.text}: {name} does not have the announced size")
            os.rename(got, to)
        except errors.LocalEntryNotFoundError as error:
            # The library's error for an unreachable hub, which would count as a missing file below.
            raise LoraError(502, f"{self._source.text}: {error}") from error
        except errors.EntryNotFoundError as error:
            raise SourceMissing(f"{name} in {self._source.text}") from error
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            raise SourceMissing(f"{self._source.text} (or it needs a token: HF_TOKEN)") from error
        except (errors.HfHubHTTPError, ValueError, OSError) as error:
            raise LoraError(502, f"{self._source.text}: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def names(self) -> list[str]:
        """See `Origin.names`."""
        try:
            return await asyncio.to_thread(
                self._hub.HfApi().list_repo_files, self._repository, revision=self._revision
            )
        except (self._errors.HfHubHTTPError, OSError, ValueError):
            return []  # only used for a better message


def _copy(path: Path, to: Path, budget: Budget) -> None:
    try:
        # Does not wait for a writer if it is a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceMissing(str(path)) from error
    except OSError as error:
        raise LoraError(502, f"{path}: {error.strerror}") from error
    with os.fdopen(handle, "rb") as read:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise LoraError(400, f"{path} is not a regular file")
        with to.open("xb") as file:
            while chunk := read.read(CHUNK_BYTES):
                budget.spend(len(chunk))
                file.write(chunk)
