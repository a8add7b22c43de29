"""The program of an intake process: takes one task at a time from its socket, fetches, decodes, answers, and waits for the next.

    python -m headwater.actors.media.program FD

It decodes what strangers send, so it has as little as possible: an environment of a few names, no descriptor but its socket,
bounded memory, and a CPU limit that is renewed for each item. It ends when the socket does. The decoders' libraries are imported when the
first item of their kind arrives.
"""

import fcntl
import gc
import os
import resource
import signal
import socket
import sys
from types import FrameType
from typing import BinaryIO, Final

import msgspec

from headwater.actors.media.request import (
    HEAD_BYTES,
    MESSAGE_BYTES_MAX,
    SEALS,
    Decoded,
    DecodedMedia,
    DecodeTask,
    FetchPolicy,
    MediaCode,
    MediaError,
    MediaKind,
    MediaLimits,
    MediaTarget,
    ProcessSetup,
    Rejected,
    Reply,
    Sink,
    check_format,
)
from headwater.actors.media.sources import (
    check_scheme,
    copy_file,
    decode_inline,
    fetch_web,
    scheme_of,
)
from headwater.engines.public_address import WebAccess


def decode(
    file: BinaryIO, kind: MediaKind, limits: MediaLimits, target: MediaTarget, out: Sink
) -> DecodedMedia:
    """Write the item's values to `out`. Raises `MediaError`, and ImportError without the extra `media`."""
    if kind == "file":
        from headwater.actors.media.document_decoder import decode_document

        return decode_document(file, limits, out)
    form = check_format(file.read(HEAD_BYTES), kind)
    file.seek(0)
    if kind == "image":
        from headwater.actors.media.image_decoder import decode_image

        return decode_image(file, form, limits.image, out, mask=target.mask)
    if kind == "audio":
        from headwater.actors.media.av_decoder import decode_audio

        return decode_audio(file, form, limits.audio, target.rate_hz, out)
    if kind == "video":
        from headwater.actors.media.av_decoder import decode_video

        return decode_video(file, form, limits.video, target.frames, out)
    from headwater.actors.media.embedding_decoder import decode_embedding

    if target.embedding is None:
        raise MediaError(MediaCode.EMBEDDINGS_OFF, "The model takes no precomputed embeddings.")
    return decode_embedding(file, form, limits.embedding, target.embedding, out)


def open_source(
    task: DecodeTask, content: BinaryIO | None, policy: FetchPolicy, network: WebAccess, bytes_max: int
) -> BinaryIO:
    """The item's file, at its beginning: in memory, not on disk, and not in this process's heap. Raises `MediaError`."""
    out = os.fdopen(os.memfd_create("media", os.MFD_CLOEXEC), "w+b")
    try:
        if content is not None:
            decode_inline(task.encoding, content, policy, bytes_max, out)
        elif scheme_of(task.url) in ("https", "http"):
            fetch_web(task.url, policy, network, bytes_max, out)
        elif scheme_of(task.url) == "file":
            copy_file(task.url, policy, bytes_max, out)
        else:
            check_scheme(scheme_of(task.url), policy)
            raise MediaError(MediaCode.BAD_URL, "The URL of the media is invalid.")
        if not out.tell():
            raise MediaError(MediaCode.EMPTY, "The file of the media is empty.")
        out.seek(0)
    except BaseException:
        out.close()
        raise
    return out


DESCRIPTORS_MAX: Final = 64
NICENESS: Final = 5
"""Decoding may take longer on a busy machine; the streams of the edge may not."""


def main(network: WebAccess | None = None) -> None:
    """Serve the socket whose descriptor is the last argument. Tests have a program of their own with another `network`."""
    with socket.socket(fileno=int(sys.argv[-1])) as link:
        setup = msgspec.msgpack.decode(link.recv(MESSAGE_BYTES_MAX), type=ProcessSetup)
        _limit(setup.memory_bytes)
        network = network or WebAccess()
        while _serve_one(link, setup.policy, network):
            gc.collect()


def _limit(memory_bytes: int) -> None:
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS_MAX, DESCRIPTORS_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _on_alarm)


def _on_alarm(_number: int, _frame: FrameType | None) -> None:
    raise MediaError(
        MediaCode.FETCH_TIMEOUT, "Fetching the media took too long. Send them in the request instead."
    )


def _serve_one(link: socket.socket, policy: FetchPolicy, network: WebAccess) -> bool:
    """Take and answer one task. False if there are no more, or if this process should not take another one."""
    message, descriptors, _, _ = socket.recv_fds(link, MESSAGE_BYTES_MAX, 1)
    if not message:
        return False
    content = os.fdopen(descriptors[0], "rb") if descriptors else None
    task = msgspec.msgpack.decode(message, type=DecodeTask)
    with os.fdopen(os.memfd_create("decoded", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb") as out:
        reply: Reply
        try:
            reply = _answer(task, content, policy, network, out)
        except MediaError as error:
            reply = Rejected(task.number, error.code, str(error))
        except MemoryError:
            reply = _out_of_memory(task)
        except ImportError as error:
            message_text = f"This server does not decode media: {error}. Install headwater[media]."
            reply = Rejected(task.number, MediaCode.UNAVAILABLE, message_text, final=True)
        finally:
            if content is not None:
                content.close()
        fds = [out.fileno()] if isinstance(reply, Decoded) else []
        socket.send_fds(link, [msgspec.msgpack.encode(reply)], fds)
    return not (isinstance(reply, Rejected) and reply.final)


def _answer(
    task: DecodeTask, content: BinaryIO | None, policy: FetchPolicy, network: WebAccess, out: BinaryIO
) -> Decoded:
    limits = getattr(task.limits, task.kind)
    _limit_cpu(limits.decode_s)
    signal.setitimer(signal.ITIMER_REAL, limits.fetch_s)
    try:
        file = open_source(task, content, policy, network, limits.bytes_max)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    with file:
        media = decode(file, task.kind, task.limits, task.target, out)
    out.flush()
    fcntl.fcntl(out.fileno(), fcntl.F_ADD_SEALS, SEALS)
    return Decoded(task.number, media)


def _limit_cpu(seconds: int) -> None:
    """Let this process use this many more seconds of CPU. Beyond them the kernel ends it, whatever it does (SIGXCPU)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def _out_of_memory(task: DecodeTask) -> Rejected:
    """The process ends: what is left of its memory may be fragmented."""
    text = "Decoding the media takes more memory than allowed. Send smaller ones."
    return Rejected(task.number, MediaCode.OUT_OF_MEMORY, text, final=True)


if __name__ == "__main__":
    main()
