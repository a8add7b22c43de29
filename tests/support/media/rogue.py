"""An intake process that was taken over: it replies as `MODE` says, to any task. `python rogue.py MODE FD`"""

import fcntl
import os
import socket
import sys
import time

import msgspec

from headwater.actors.media.request import (
    MESSAGE_BYTES_MAX,
    SEALS,
    Decoded,
    DecodedMedia,
    DecodeTask,
    MediaCode,
    Rejected,
)

MODE, LINK = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))


def memory(size: int, seals: int) -> int:
    """Shared memory of this size."""
    descriptor = os.memfd_create("rogue", os.MFD_ALLOW_SEALING)
    os.write(descriptor, bytes(size))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


LINK.recv(MESSAGE_BYTES_MAX)
task = msgspec.msgpack.decode(socket.recv_fds(LINK, MESSAGE_BYTES_MAX, 1)[0], type=DecodeTask)
media = DecodedMedia("uint8", (1, 1, 3), "png")
good = Decoded(task.number, media)
if MODE == "closes":
    LINK.close()
elif MODE == "garbage":
    LINK.send(b"\xc1garbage")
else:
    reply, descriptors = {
        "honest": (good, [memory(3, SEALS)]),
        "unsealed": (good, [memory(3, 0)]),
        "may shrink": (good, [memory(3, fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)]),
        "smaller than stated": (good, [memory(2, SEALS)]),
        "larger than stated": (good, [memory(9999, SEALS)]),
        "no memory": (good, []),
        "a file of its own": (good, [os.open(__file__, os.O_RDONLY)]),
        "another task": (Decoded(99, media), [memory(3, SEALS)]),
        "unknown type": (Decoded(task.number, media._replace(dtype="object")), [memory(3, SEALS)]),
        "negative shape": (Decoded(task.number, media._replace(shape=(-1, -1, 3))), [memory(3, SEALS)]),
        "memory with a rejection": (Rejected(task.number, MediaCode.EMPTY, "Empty."), [memory(3, SEALS)]),
    }[MODE]
    socket.send_fds(LINK, [msgspec.msgpack.encode(reply)], descriptors)
time.sleep(600)
