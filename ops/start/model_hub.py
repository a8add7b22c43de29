"""Download of a model from a Hugging Face hub, by its library, into the cache that engines and other programs share.

The library finds the endpoint (HF_ENDPOINT), the token (HF_TOKEN or its login), the folder (HF_HUB_CACHE, HF_HOME) and whether it
may use the network at all (HF_HUB_OFFLINE). It keeps what is complete, resumes a connection that breaks, and downloads each file
once for a machine. Added here: one format of the weights, room on the disk, and digests of all that was downloaded.

    models--ORG--NAME/
      blobs/DIGEST                  contents
      snapshots/COMMIT/config.json  a link to them
      refs/main                     the commit of a branch
      .headwater/COMMIT.json        what was downloaded, and found to be as announced
      .headwater/unverified.json    files of a download that has not ended
"""

import contextlib
import glob
import json
from pathlib import Path
from typing import Any, Final

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.file_download import repo_folder_name

from headwater.engines import logs
from headwater.ops.start.model_source import DownloadFailed
from headwater.ops.start.model_store import (
    RemoteFile,
    bytes_of,
    check_space,
    choose,
    load,
    locked,
    progress,
    replace,
    verify,
)

ATTEMPTS: Final = 2
"""A file that is not what the hub announced is downloaded once more."""


def download(repository: str, revision: str, *, weights: bool) -> Path:
    """The folder of a model's files at a revision: a branch, a tag or a commit. Raises `DownloadFailed`."""
    cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    revision = revision or constants.DEFAULT_REVISION
    if constants.HF_HUB_OFFLINE:
        return _cached(cache, revision, weights, "HF_HUB_OFFLINE is set")
    try:
        with locked(Path(constants.HF_HUB_CACHE) / ".locks" / cache.name / "headwater.lock", repository):
            return _HubDownload(repository, revision, cache, weights).run()
    except errors.GatedRepoError as error:
        raise DownloadFailed(
            f"its owner grants access on request: ask for it at {constants.ENDPOINT}/{repository}, then give your token "
            f"in HF_TOKEN ({_token()})"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadFailed(f"the hub has no revision {revision} of it") from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadFailed(
            f"no such folder, and {constants.ENDPOINT} has no such model, or it is private: give the token of an account "
            f"that may read it in HF_TOKEN ({_token()})"
        ) from error
    except errors.HFValidationError as error:
        raise DownloadFailed(str(error)) from error
    except DownloadFailed:
        raise
    except Exception as error:
        # Connections fail with errors of whichever HTTP client the library has. A model that is here serves without its hub.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        with contextlib.suppress(DownloadFailed):
            folder = _cached(cache, revision, weights, reason)
            logs.say(f"{repository}: {reason}; serving revision {revision} as it was downloaded before")
            return folder
        raise DownloadFailed(
            f"{reason}. What was downloaded whole stays in {cache}: start again to continue"
        ) from error


class _HubDownload:
    def __init__(self, repository: str, revision: str, cache: Path, weights: bool) -> None:
        self._repository, self._revision = repository, revision
        self._cache, self._weights = cache, weights
        self._unverified = cache / ".headwater" / "unverified.json"

    def run(self) -> Path:
        commit = self._revision
        record = self._cache / ".headwater" / f"{commit}.json"
        if _serves(record, self._weights):
            # A commit never changes: nothing is asked of the hub.
            return self._cache / "snapshots" / commit
        api = huggingface_hub.HfApi()
        commit = api.repo_info(self._repository, revision=self._revision).sha or ""
        record = record.with_name(f"{commit}.json")
        files = choose(self._listed(api, commit), weights=self._weights)
        self._remove_parts()
        for attempt in range(ATTEMPTS):
            folder = self._fetch(commit, files)
            wrong = self._remove_wrong(folder, files)
            if not wrong:
                break
            logs.say(f"{self._repository}: {'; '.join(wrong)}: removed")
            if attempt + 1 == ATTEMPTS:
                raise DownloadFailed(f"{wrong[0]}, {ATTEMPTS} times: nothing of this file was kept")
        self._remember(record, files)
        return folder

    def _listed(self, api: Any, commit: str) -> list[RemoteFile]:
        entries = api.list_repo_tree(self._repository, revision=commit, recursive=True)
        return [
            RemoteFile(entry.path, entry.lfs.size, entry.lfs.sha256)
            if entry.lfs is not None
            else RemoteFile(entry.path, entry.size, entry.blob_id)
            for entry in entries
            if isinstance(entry, huggingface_hub.hf_api.RepoFile)
        ]

    def _fetch(self, commit: str, files: list[RemoteFile]) -> Path:
        blobs = self._cache / "blobs"
        missing = [file for file in files if not (blobs / file.digest).exists()]
        blobs.mkdir(parents=True, exist_ok=True)
        check_space(sum(file.size for file in missing), blobs)
        suspected = {file.digest for file in missing} | set(load(self._unverified, []))
        replace(self._unverified, json.dumps(sorted(suspected)))
        total = sum(file.size for file in files)
        folder = ""
        try:
            with contextlib.ExitStack() as stack:
                if missing:
                    places = [blobs / file.digest for file in files]
                    stack.enter_context(
                        progress(
                            self._repository,
                            total,
                            lambda: min(total, bytes_of([*places, *blobs.glob("*.incomplete")])),
                        )
                    )
                folder = huggingface_hub.snapshot_download(
                    self._repository,
                    revision=commit,
                    allow_patterns=[glob.escape(file.name) for file in files],
                )
        finally:
            self._remove_parts()
        self._write_reference(commit)
        return Path(folder)

    def _remove_wrong(self, folder: Path, files: list[RemoteFile]) -> list[str]:
        """Verify what was downloaded by this process, or by one that did not come to it; returns what was wrong and is removed."""
        suspected = set(load(self._unverified, []))
        wrong = []
        for file in files:
            path = folder / file.name
            if file.digest not in suspected:
                continue
            problem = verify(path, file)
            if problem:
                wrong.append(problem)
                path.resolve().unlink()
                path.unlink(missing_ok=True)
        return wrong

    def _remove_parts(self) -> None:
        """Remove what processes that were killed left of files. Each file that is being downloaded is locked by the library."""
        import filelock

        locks = Path(constants.HF_HUB_CACHE) / ".locks" / self._cache.name
        for part in (self._cache / "blobs").glob("*.incomplete"):
            lock = locks / f"{part.name.partition('.')[0]}.lock"
            with contextlib.suppress(OSError, filelock.Timeout):
                if lock.exists():
                    with filelock.FileLock(lock, timeout=0):
                        part.unlink(missing_ok=True)
                else:
                    part.unlink(missing_ok=True)

    def _write_reference(self, commit: str) -> None:
        """Do what the library does for a branch: it was given the commit."""
        if self._revision != commit:
            replace(self._cache / "refs" / self._revision, commit)

    def _remember(self, record: Path, remote_files: list[RemoteFile]) -> None:
        earlier = load(record, {})
        files = earlier.get("files", {}) | {file.name: file.digest for file in remote_files}
        document = {"weights": self._weights or earlier.get("weights", False), "files": files}
        replace(record, json.dumps(document))
        self._unverified.unlink(missing_ok=True)


def _cached(cache: Path, revision: str, weights: bool, reason: str) -> Path:
    """The folder of what was downloaded before, by whatever program. Raises `DownloadFailed`."""
    reference = cache / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = cache / "snapshots" / commit
    record = cache / ".headwater" / f"{commit}.json"
    if not folder.is_dir():
        raise DownloadFailed(f"{reason}, and {constants.HF_HUB_CACHE} does not have it at {revision}")
    if not _serves(record, weights):
        if record.exists():
            raise DownloadFailed(f"{reason}, and only a part of {revision} is in {constants.HF_HUB_CACHE}")
        if load(cache / ".headwater" / "unverified.json", []):
            raise DownloadFailed(
                f"{reason}, and a download to {constants.HF_HUB_CACHE} did not end: start once with the network"
            )
    return folder


def _serves(record: Path, weights: bool) -> bool:
    """Were all files of a snapshot downloaded that are needed, and are they still there?"""
    recorded = load(record, {})
    folder = record.parents[1] / "snapshots" / record.stem
    all_exist = all((folder / name).exists() for name in recorded.get("files", ()))
    return bool(recorded) and all_exist and (recorded["weights"] or not weights)


def _token() -> str:
    return "one is set" if huggingface_hub.get_token() else "none is set"
