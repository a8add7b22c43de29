"""A video job as OpenAI's API shows it. Pure."""

from typing import Any

import msgspec

from headwater.actors.edge.videos.job import VideoJob


def video_resource(job: VideoJob) -> dict[str, Any]:
    """The object of a job. `frames`, `fps` and `seed` are extensions."""
    request = job.request
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": job.status,
        "progress": job.progress,
        "created_at": job.created_s,
        "completed_at": job.completed_s if job.status == "completed" else None,
        "expires_at": job.expires_s or None,
        "prompt": request.prompt,
        "size": f"{request.width}x{request.height}",
        "seconds": job.seconds,
        "error": {"code": job.error_code, "message": job.error} if job.status == "failed" else None,
        "remixed_from_video_id": None,
        "frames": request.frames,
        "fps": request.fps,
        "seed": request.seed,
    }


def video_event(job: VideoJob) -> bytes:
    """The server-sent event of a job's present state."""
    kind = f"video.{job.status}"
    document = {"type": kind, "video": video_resource(job)}
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(document))
