"""What the start of workers asks of an engine, and which of its releases are known, with their published vulnerabilities.

An engine's package answers with a subclass of `EngineLauncher`, which its traits name. Nothing here imports the engine itself before `make`,
`run_follower` or `import_once`.
"""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

import structlog

from headwater.engines import registry
from headwater.engines.engine import Engine, EngineUnavailable
from headwater.engines.model_files import (
    NO_FILES,
    ModelFiles,
    byte_model_files,
    read_model_files,
    read_pipeline_files,
)
from headwater.engines.registry import EngineEntry
from headwater.engines.traits import EMBEDDINGS_MIB, EngineTraces
from headwater.schemas.events import Role
from headwater.schemas.tables import ModelCard

_log = structlog.get_logger("headwater.engine")

Release = tuple[int, int, int]


class Vulnerability(NamedTuple):
    """A published vulnerability, fixed in release `fixed`. `refused`: affected engines are not started."""

    cve: str
    fixed: Release
    what: str
    refused: bool = False


SGLANG_DIFFUSION_BROKER: Final = Vulnerability(
    "CVE-2026-3059", (0, 5, 10), "unpickles data from an open port (diffusion broker)", refused=True
)
"""SGLang starts that broker with its server for language models and with that for diffusion models."""


def release(version: str) -> Release | None:
    """The numbers of a version ("0.14.1rc2+cpu" is 0.14.1), None without any, as of a build from source."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def open_vulnerabilities(version: str, vulnerabilities: Iterable[Vulnerability]) -> list[Vulnerability]:
    """Those that a release has; none of a build from source without a release number, such as 0.0.0."""
    release_number = release(version)
    return [
        vulnerability
        for vulnerability in vulnerabilities
        if release_number is not None and (0, 1, 0) <= release_number < vulnerability.fixed
    ]


class Releases(NamedTuple):
    """What is known of an engine's releases. `engine` is its name for users, `distributions` are those that it is installed as.

    `vulnerabilities` are those that matter behind Headwater's edge; `flag` starts an affected release nevertheless. `oldest` is the first
    that the adapter was written for.
    """

    engine: str = ""
    distributions: tuple[str, ...] = ()
    vulnerabilities: tuple[Vulnerability, ...] = ()
    flag: str = ""
    oldest: Release = (0, 0, 0)

    def installed(self) -> str:
        """Return the installed version, "" without one."""
        for name in self.distributions:
            with contextlib.suppress(metadata.PackageNotFoundError):
                return metadata.version(name)
        return ""

    def check(self, version: str, *, allow: bool) -> None:
        """Log the vulnerabilities of an installed release, and whether it is older than what the adapter was written for.

        Raises `EngineUnavailable` if one of them is refused, unless `allow`.
        """
        release_number = release(version)
        # Versions like 0.0.0 are builds from source without release number.
        if release_number is None or release_number < (0, 1, 0):
            return
        open_ = open_vulnerabilities(version, self.vulnerabilities)
        for vulnerability in open_:
            _log.warning(
                "vulnerable_version",
                engine=self.engine,
                version=version,
                cve=vulnerability.cve,
                what=vulnerability.what,
            )
        refused = [vulnerability for vulnerability in open_ if vulnerability.refused]
        if refused and not allow:
            worst = max(refused, key=lambda vulnerability: vulnerability.fixed)
            needed = ".".join(map(str, worst.fixed))
            raise EngineUnavailable(
                f"{self.engine} {version} has known vulnerabilities ({', '.join(vulnerability.cve for vulnerability in refused)}; {worst.cve}: it "
                f"{worst.what}): install {needed} or newer, or start with {self.flag}"
            )
        if release_number < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            _log.warning("old_version", engine=self.engine, version=version, oldest=oldest)


OptionsT = TypeVar("OptionsT")


class WorkerSpec(NamedTuple):
    """One worker, as settings describe it to any engine. `model` is the folder of its model, "" for an engine that needs none.

    With `reads_embeddings` it takes those of encode workers, with `accepts_embeddings` those of clients. `online`: it may fetch adapters
    from a hub. `side_port` is the first of its ports beside Headwater's, 0: none.
    """

    name: str
    role: Role = "both"
    model: str = ""
    served_model_name: str = ""
    block_size: int = 0
    max_model_len: int = 0
    reads_embeddings: bool = False
    accepts_embeddings: bool = False
    embeddings_mib: int = EMBEDDINGS_MIB
    exports_metrics: bool = False
    online: bool = False
    side_port: int = 0
    traces: EngineTraces = EngineTraces()


class EngineSettings(NamedTuple, Generic[OptionsT]):
    """What the adapter of a library is created from: its worker, its options, and the files of the worker's model, as far as they are read."""

    worker: WorkerSpec
    options: OptionsT
    files: ModelFiles = NO_FILES


class PortRange(NamedTuple):
    """`size` ports starting at `first`, assigned to `owner` by `flag`."""

    flag: str
    owner: str
    first: int
    size: int = 1


class Follower(NamedTuple):
    """A process that is a part of a worker elsewhere, and no worker itself: its name, its rank in metrics, and the address at which it meets
    the others (`host:port`, "": unknown). `ends_with_it`: its leader listens there for as long as it lives.
    """

    name: str
    rank: str = "0"
    leader: str = ""
    ends_with_it: bool = False


class EngineLauncher(Generic[OptionsT]):
    """The launcher of an engine with its options: see `EngineTraits.options`. Every method may raise `EngineUnavailable`.

    Except for `make`, the defaults are those of an engine without ports, processes and arguments of its own.
    """

    releases: ClassVar[Releases] = Releases()
    """What is known of the engine's releases."""

    def __init__(self, entry: EngineEntry, options: OptionsT) -> None:
        self.entry = entry
        self.options = options

    def computes_on_cpu(self) -> bool:
        """Does what is installed of the engine use no GPU, even where there is one?"""
        return False

    def gpus(self) -> int:
        """GPUs of one worker."""
        return 1

    def side_ports(self, role: Role) -> int:
        """Return how many ports a worker of this role needs beside Headwater's, for hand-offs; here one, if the option `handoff_port` is given."""
        return int(getattr(self.options, "handoff_port", 0) > 0)

    def is_met(self, role: Role) -> bool:
        """Return whether other workers' engines fetch KV from one of this role, at an address of this machine; here if the option `handoff_host` is given."""
        return bool(getattr(self.options, "handoff_host", ""))

    def ports(self, workers: Sequence[WorkerSpec]) -> list[PortRange]:
        """The ports that the engine's own arguments give to these workers."""
        return []

    def check(self, workers: Sequence[WorkerSpec]) -> None:
        """Check options and installation before anything is loaded. `model` may still be what `--model` says."""
        allow = "vulnerable" in getattr(self.options, "allow", ())
        self.releases.check(self.releases.installed(), allow=allow)

    def known_block_size(self, worker: WorkerSpec) -> int:
        """Tokens per KV block that the engine will have, 0 if only the engine knows."""
        return worker.block_size

    def check_fleet(self, worker: WorkerSpec, model: str, cards: Iterable[ModelCard], live: set[str]) -> None:
        """Check the engine against the cards of pools; `live` are those that have workers now, `model` is the name that clients use."""

    def follower(self) -> Follower | None:
        """Return what this process is if the options make it a part of a worker elsewhere."""
        return None

    def run_follower(self, worker: WorkerSpec) -> None:
        """Run as a `follower` until its leader ends. Raises `EngineInterrupted` after a signal."""
        raise NotImplementedError("an engine whose `follower` returns one has this too")

    def node_arguments(self, nodes: int, rank: int, leader: str, port: int) -> list[str]:
        """The engine's own arguments for the process of this rank, of a worker that spans `nodes` hosts. `leader` is the address of rank 0, `port` a free one there."""
        raise EngineUnavailable(f"the engine {self.entry.name} cannot span several hosts: leave `nodes` out")

    def shares_import(self) -> bool:
        """Are the workers of this machine to be forks of one process, which has imported the engine?"""
        return False

    def import_once(self, workers: Sequence[WorkerSpec]) -> None:
        """Import what these workers need, which will be forks of this process."""
        raise NotImplementedError("an engine whose `shares_import` is true has this too")

    def read_files(self, worker: WorkerSpec) -> ModelFiles:
        """The files of the worker's model that an edge needs; those of a model with one token per byte for an engine without a model."""
        if worker.model:
            return read_model_files(Path(worker.model))
        return byte_model_files(worker.served_model_name or self.entry.name)

    def make(self, worker: WorkerSpec, files: ModelFiles) -> Engine:
        """The engine of a worker, not started."""
        raise NotImplementedError


class PipelineLauncher(EngineLauncher[dict[str, Any]]):
    """The launcher of an engine that loads a pipeline in diffusers' layout."""

    def read_files(self, worker: WorkerSpec) -> ModelFiles:
        """See `EngineLauncher.read_files`."""
        return read_pipeline_files(worker.model, worker.served_model_name)


def launcher_type(engine: str) -> type[EngineLauncher[Any]]:
    """The launcher's class of an engine. Raises `EngineUnavailable`."""
    place = registry.traits_of(engine).launcher
    module, _, attribute = place.partition(":")
    kind: Any = registry.load(EngineEntry(engine, module, attribute))
    if not issubclass(kind, EngineLauncher):
        raise EngineUnavailable(f"{place}, of the engine {engine}, is no EngineLauncher")
    launcher: type[EngineLauncher[Any]] = kind
    return launcher


def launcher_of(engine: str, options: Any) -> EngineLauncher[Any]:
    """The launcher of an engine with these options. Raises `EngineUnavailable`."""
    return launcher_type(engine)(registry.find(engine), options)


# The GPUs of this machine.

DEVICES: Final = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that workers may use: those in CUDA_VISIBLE_DEVICES, else all that the driver lists."""
    if DEVICES in environ:
        return tuple(name.strip() for name in environ[DEVICES].split(",") if name.strip())
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    try:
        listed = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    return tuple(map(str, range(count)))
