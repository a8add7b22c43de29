"""SGLang's diffusion server: its process, started, watched and stopped with all its own processes, and a client of its HTTP API.

The client has the part of the API that is used, as of 0.5.23.
"""

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import socket
import struct
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from headwater.engines import process as engine_process
from headwater.engines.engine import EngineDied, EngineError, EngineUnavailable, RequestRejected
from headwater.schemas.inference import ImageRequest, VideoRequest
from headwater.schemas.media import PromptMedia

SCRIPT: Final = Path(__file__).with_name("server.py")
STOP_S: Final = 15.0
"""What SGLang has to end its processes before they are killed."""

TAIL_BYTES: Final = 2_000
"""Bytes of the server's output in the error if it did not start."""

_log = structlog.get_logger("headwater.sglang_diffusion")


class ModelDefaults(msgspec.Struct, frozen=True):
    """What SGLang generates for a request that leaves it out; 0 where the model says nothing."""

    width: int = 0
    height: int = 0
    num_frames: int = 0
    fps: int = 0
    num_inference_steps: int = 0


class DiffusionServer:
    """One server, listening on this machine only. Its files are in a folder of its own, which goes with it.

    Its output goes to this process's standard error stream.
    """

    def __init__(self, python: str, model: str, arguments: Sequence[str]) -> None:
        self.folder = engine_process.take("sglang-diffusion")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = (
            python or sys.executable,
            str(SCRIPT),
            str(self._defaults),
            *("--model-path", model, "--host", "127.0.0.1", "--port", str(port)),
            *("--output-path", str(self.folder / "outputs")),
            *("--input-save-path", str(self._inputs)),
            *arguments,
        )
        self._process: asyncio.subprocess.Process | None = None
        self._tail = b""
        self._copying: asyncio.Task[None] | None = None

    @property
    def _defaults(self) -> Path:
        return self.folder / "defaults.json"

    async def start(self) -> None:
        """Start the process. Raises `EngineUnavailable` for an interpreter that does not exist."""
        try:
            # A group of its own: what SGLang starts is stopped with it.
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineUnavailable(
                f"{self._command[0]} cannot be run ({error}): the option python must name the interpreter of an "
                "environment with sglang[diffusion]"
            ) from error
        self._copying = asyncio.create_task(self._copy_output(self._process), name="SGLang's output")

    def check(self) -> None:
        """Raises `EngineDied` with the end of its output if the process has ended."""
        if self._process is None or self._process.returncode is not None:
            code = self._process.returncode if self._process is not None else None
            tail = self._tail.decode("utf-8", "replace").strip()
            raise EngineDied(f"SGLang's diffusion server ended with exit code {code}: {tail}")

    def defaults(self) -> ModelDefaults:
        """Return what the model says, once the server is ready."""
        return msgspec.json.decode(self._defaults.read_bytes(), type=ModelDefaults)

    @property
    def _inputs(self) -> Path:
        return self.folder / "inputs"

    def remove_inputs(self) -> None:
        """Remove the images that the server kept of an edit."""
        shutil.rmtree(self._inputs, ignore_errors=True)
        self._inputs.mkdir()

    def remove_output(self, path: str) -> None:
        """Remove a file that the server wrote, if it is one of its own."""
        file = Path(path)
        if file.is_relative_to(self.folder):
            file.unlink(missing_ok=True)

    async def stop(self) -> None:
        """Stop the server and all its processes, and remove its files."""
        process = self._process
        if process is not None and process.returncode is None:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                _log.warning("engine_stop_timed_out")
        self._signal(signal.SIGKILL)
        if process is not None:
            await process.wait()
        if self._copying is not None:
            self._copying.cancel()
            await asyncio.gather(self._copying, return_exceptions=True)
        engine_process.give_up(self.folder)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def _copy_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while data := await process.stdout.read(65_536):
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()


SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
RGB: Final = 2
FAST: Final = 1
"""Level of compression: the file goes to a server on this machine."""


def png(item: PromptMedia) -> bytes:
    """An image of shape (height, width, 3), uint8. Raises `RequestRejected` for one without its data."""
    height, width, _ = item.shape
    if len(item.data) != item.size:
        raise RequestRejected(f"an image of {item.size} bytes came with {len(item.data)}", param="image")
    row = 3 * width
    # Each row begins with the number of its filter, 0 for none.
    rows = b"".join(b"\0" + item.data[at : at + row] for at in range(0, len(item.data), row))
    header = struct.pack(">IIBBBBB", width, height, 8, RGB, 0, 0, 0)
    return (
        SIGNATURE
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows, FAST))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# The client, and the types of its replies.

CALL_S: Final = 30.0
"""The time limit of a call that generates nothing. An image is the answer to its call, which takes as long as it takes."""


class DiffusionModel(msgspec.Struct, frozen=True):
    """The reply to GET /model_info: what the pipeline does, such as T2V (a video from text) or T2I (an image)."""

    supported_task_types: tuple[str, ...] = ()
    architectures: tuple[str, ...] | None = None


class _ServerInfo(msgspec.Struct, frozen=True):
    version: str = ""


class VideoState(msgspec.Struct, frozen=True):
    """The state of a video job: queued, in_progress, completed or failed; `progress` in percent; the file that the server wrote."""

    id: str
    status: str
    progress: int = 0
    error: dict[str, Any] | None = None
    file_path: str | None = None


class _AnswerImage(msgspec.Struct, frozen=True):
    b64_json: str
    file_path: str | None = None


class _ImagesAnswer(msgspec.Struct, frozen=True):
    data: tuple[_AnswerImage, ...]


class DiffusionClient:
    """The client of one server. Raises `EngineError` where the server does not answer, or with an error of its own."""

    def __init__(self, url: str) -> None:
        """Raises `EngineUnavailable`."""
        try:
            import httpx
        except ImportError as error:
            raise EngineUnavailable(
                f"httpx cannot be imported ({error}): install headwater[sglang-diffusion]"
            ) from error
        # AttributeError: anyio's, where the server closed a connection before anyio asked for its peer.
        self._errors = (httpx.HTTPError, AttributeError)
        # Of this machine: no proxy of the environment is between.
        self._http: httpx.AsyncClient = httpx.AsyncClient(base_url=url, timeout=CALL_S, trust_env=False)

    async def is_healthy(self) -> bool:
        """Return whether the server takes requests. Raises `EngineError` with the reason once its processes have died."""
        try:
            answer = await self._http.get("/health")
        except self._errors:
            return False
        if answer.status_code != 200 and answer.content:
            raise EngineError(f"SGLang's diffusion server: {answer.text[:300]}")
        return answer.status_code == 200

    async def model(self) -> DiffusionModel:
        """Return what the server generates."""
        return msgspec.json.decode(await self._call("GET", "/model_info"), type=DiffusionModel)

    async def version(self) -> str:
        """SGLang's release."""
        return msgspec.json.decode(await self._call("GET", "/server_info"), type=_ServerInfo).version

    async def generate_image(self, request: ImageRequest, number: int) -> tuple[bytes, str]:
        """Image number `number` of a request, and the path of the file that the server wrote, "" for none."""
        body = _common(request, request.seed + number) | {
            "n": 1,
            "response_format": "b64_json",
            "output_format": request.format,
            "output_compression": None if request.format == "png" else request.quality,
        }
        if request.images:
            fields = {name: value for name, value in body.items() if value is not None}
            files = [
                ("image", (f"{at}.png", png(item), "image/png")) for at, item in enumerate(request.images)
            ]
            sent = {"data": fields, "files": files}
            answer = await self._call("POST", "/v1/images/edits", timeout_s=None, **sent)
        else:
            answer = await self._call("POST", "/v1/images/generations", json=body, timeout_s=None)
        images = msgspec.json.decode(answer, type=_ImagesAnswer).data
        if not images:
            raise EngineError("SGLang's diffusion server gave no image")
        return base64.b64decode(images[0].b64_json), images[0].file_path or ""

    async def create_video(self, request: VideoRequest) -> VideoState:
        """Begin a video."""
        body = _common(request, request.seed) | {"num_frames": request.frames, "fps": request.fps}
        return msgspec.json.decode(await self._call("POST", "/v1/videos", json=body), type=VideoState)

    async def video(self, id_: str) -> VideoState:
        """Return how far a video is."""
        return msgspec.json.decode(await self._call("GET", f"/v1/videos/{id_}"), type=VideoState)

    async def video_file(self, id_: str) -> bytes:
        """The mp4 file of a completed video."""
        return await self._call("GET", f"/v1/videos/{id_}/content")

    async def forget_video(self, id_: str) -> None:
        """Remove the server's record of a video. It does not stop one that is being generated."""
        await self._call("DELETE", f"/v1/videos/{id_}")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _call(self, method: str, path: str, *, timeout_s: float | None = CALL_S, **sent: Any) -> bytes:
        try:
            answer = await self._http.request(method, path, timeout=timeout_s, **sent)
        except self._errors as error:
            raise EngineError(f"SGLang's diffusion server: {error or type(error).__name__}") from error
        if answer.status_code in (400, 422):
            raise RequestRejected(f"SGLang: {_detail(answer.text)}")
        if answer.status_code != 200:
            raise EngineError(f"SGLang's diffusion server: {answer.status_code} {_detail(answer.text)}")
        return answer.content


def _common(request: ImageRequest | VideoRequest, seed: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": request.prompt,
        "size": f"{request.width}x{request.height}",
        "num_inference_steps": request.steps,
        # SGLang's seeds have 63 bits too; its noise is the CPU's, the same on every device.
        "seed": seed % 2**63,
        "generator_device": "cpu",
    }
    if request.negative_prompt:
        body["negative_prompt"] = request.negative_prompt
    if request.guidance is not None:
        body["guidance_scale"] = request.guidance
    return body


def _detail(text: str) -> str:
    """FastAPI's reason, else the whole answer."""
    try:
        detail = msgspec.json.decode(text.encode())["detail"]
    except (msgspec.DecodeError, KeyError, TypeError):
        detail = text
    return str(detail)[:500]
