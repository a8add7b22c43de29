"""A double of SGLang's diffusion server, as of 0.5.23: the same routes, answers and errors, and files that are a function of the seed.

    python sglang_double.py SCRIPT DEFAULTS_FILE --model-path NAME --port PORT … [--task T2I] [--version 0.5.23]

One file at a time, as SGLang's scheduler; nothing can be stopped. Images of an edit are kept where SGLang keeps them, and what it makes of
them depends on their pixels. A prompt "fail" fails, "reject" is a 400, "die" ends the process.
"""

import argparse
import base64
import ctypes
import email.policy
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image

STEP_S = 0.02
TASKS = {"generations": ("T2I", "TI2I"), "edits": ("TI2I", "I2I")}
VIDEOS: dict[str, dict[str, Any]] = {}
SCHEDULER = threading.Lock()
DEFAULTS = {"width": 832, "height": 480, "num_frames": 81, "fps": 16, "num_inference_steps": 50}


class Wrong(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def made(body: dict[str, Any]) -> bytes:
    """What is generated: the same for the same request."""
    wanted = {name: value for name, value in body.items() if value is not None}
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).digest() * 100


def check(body: dict[str, Any]) -> None:
    """As SGLang's own parameters."""
    if body["prompt"] == "reject":
        raise Wrong(400, "the prompt is not accepted")
    width, _, height = body["size"].partition("x")
    if int(width) % 16 or int(height) % 16:
        raise Wrong(400, f"size {body['size']} is not supported")


def compute(body: dict[str, Any], step: Any) -> bytes:
    """Take the scheduler, and then as long as the steps do."""
    with SCHEDULER:
        for number in range(1, body["num_inference_steps"] + 1):
            if body["prompt"] == "die":
                os._exit(9)
            time.sleep(STEP_S)
            step(number)
        if body["prompt"] == "fail":
            raise RuntimeError("Model generation failed. Error from scheduler: out of memory")
        return made(body)


class Handler(BaseHTTPRequestHandler):
    """The routes."""

    protocol_version = "HTTP/1.1"
    arguments: argparse.Namespace

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """See `_answer`."""
        self._answer({})

    def do_DELETE(self) -> None:
        """See `_answer`."""
        self._answer({})

    def do_POST(self) -> None:
        """See `_answer`."""
        data, kind = self.rfile.read(int(self.headers["content-length"])), self.headers["content-type"]
        self._answer(json.loads(data) if kind == "application/json" else self._form(kind, data))

    def _form(self, kind: str, data: bytes) -> dict[str, Any]:
        """A form's fields, with numbers as such, and the pixels of its images."""
        message = email.message_from_bytes(
            b"content-type: %b\r\n\r\n%b" % (kind.encode(), data), policy=email.policy.HTTP
        )
        body: dict[str, Any] = {"image": []}
        for part in message.iter_parts():
            name, content = part.get_param("name", header="content-disposition"), part.get_content()
            if part.get_filename() is None:
                text = content.strip()
                body[str(name)] = int(text) if text.isdigit() else text
                continue
            inputs = Path(self.arguments.input_save_path)
            inputs.mkdir(exist_ok=True)
            (inputs / f"{uuid.uuid4()}_{part.get_filename()}").write_bytes(content)
            with Image.open(io.BytesIO(content)) as image:
                pixels = hashlib.sha256(image.tobytes()).hexdigest()
                body[str(name)].append([image.size, image.mode, pixels])
        return body

    def _answer(self, body: dict[str, Any]) -> None:
        try:
            found, status = self._route(self.command, self.path.strip("/").split("/"), body), 200
        except Wrong as wrong:
            found, status = {"detail": str(wrong)}, wrong.status
        except RuntimeError as error:
            found, status = {"detail": str(error)}, 500
        data = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _route(self, method: str, path: list[str], body: dict[str, Any]) -> Any:
        task = self.arguments.task
        match method, path:
            case "GET", ["health"]:
                return {"status": "ok"}
            case "GET", ["model_info"]:
                return {
                    "model_type": "diffusion",
                    "architectures": ["Double"],
                    "supported_task_types": [task],
                }
            case "GET", ["server_info"]:
                return {"model_path": self.arguments.model_path, "version": self.arguments.version}
            case "POST", ["v1", "images", "generations" | "edits" as what]:
                if task not in TASKS[what]:
                    raise Wrong(400, f"the pipeline has no {what}")
                if what == "edits" and not body["image"]:
                    raise Wrong(422, "Field 'image' or 'url' is required")
                check(body)
                image = compute(body, lambda _: None)
                path_ = self._written(image, body["output_format"])
                return {
                    "id": "x",
                    "data": [{"b64_json": base64.b64encode(image).decode(), "file_path": path_}],
                }
            case "POST", ["v1", "videos"] if task == "T2V":
                check(body)
                return self._begun(body)
            case (("GET" | "DELETE"), ["v1", "videos", id_, *rest]):
                return self._job(method, id_, rest)
        raise Wrong(404, "Not Found")

    def _written(self, data: bytes, kind: str) -> str:
        folder = Path(self.arguments.output_path)
        folder.mkdir(exist_ok=True)
        file = folder / f"{uuid.uuid4()}.{kind}"
        file.write_bytes(data)
        return str(file)

    def _begun(self, body: dict[str, Any]) -> dict[str, Any]:
        id_ = str(uuid.uuid4())
        job = VIDEOS[id_] = {"id": id_, "object": "video", "status": "queued", "progress": 0, "error": None}

        def step(number: int) -> None:
            job.update(status="in_progress", progress=min(99, 100 * number // body["num_inference_steps"]))

        def run() -> None:
            try:
                data = compute(body, step)
            except RuntimeError as error:
                job.update(status="failed", error={"message": str(error)})
                return
            job.update(file_path=self._written(data, "mp4"))
            job.update(status="completed", progress=100)

        threading.Thread(target=run, daemon=True).start()
        return job

    def _job(self, method: str, id_: str, rest: list[str]) -> Any:
        job = VIDEOS.get(id_)
        if job is None:
            raise Wrong(404, "Video not found")
        if method == "DELETE":
            del VIDEOS[id_]
            return {**job, "status": "deleted"}
        if rest != ["content"]:
            return job
        if job["status"] not in ("completed", "failed"):
            raise Wrong(404, "Generation is still in-progress")
        return Path(job["file_path"]).read_bytes()


def main() -> None:
    """Until it is stopped."""
    parser = argparse.ArgumentParser()
    for name in ("script", "defaults"):
        parser.add_argument(name)
    for name in ("--model-path", "--host", "--port", "--output-path", "--input-save-path"):
        parser.add_argument(name, required=True)
    parser.add_argument("--task", default="T2V")
    parser.add_argument("--version", default="0.5.23")
    arguments = Handler.arguments = parser.parse_args()
    # As the script that runs SGLang.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if arguments.task == "broken":
        sys.exit("the model cannot be loaded")
    Path(arguments.defaults).write_text(json.dumps(DEFAULTS))
    try:
        ThreadingHTTPServer((arguments.host, int(arguments.port)), Handler).serve_forever()
    finally:
        shutil.rmtree(Path(arguments.defaults).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
