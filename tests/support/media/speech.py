"""Speech, spoken by eSpeak NG: the words of a recording are known, and no recording is stored."""

import ctypes
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from tests.support.media.recordings import wav

WORDS_A_MINUTE: Final = 140
SYNCHRONOUS, RATE_PARAMETER, UTF8 = 2, 1, 1


@cache
def spoken(text: str) -> bytes:
    """A WAV file with these words in American English."""
    # A process of its own: the library has global state, and keeps threads.
    made = subprocess.run(
        [sys.executable, "-m", "tests.support.media.speech", text], stdout=subprocess.PIPE, check=True
    )
    rate_hz, samples = int.from_bytes(made.stdout[:4], "little"), np.frombuffer(made.stdout[4:], "<i2")
    return wav(samples[:, None], rate_hz)


def _say(text: str) -> bytes:
    """The rate as four bytes, and 16-bit samples."""
    spec = find_spec("espeakng_loader")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
    rate_hz: int = library.espeak_Initialize(SYNCHRONOUS, 0, str(folder / "espeak-ng-data").encode(), 0)
    heard = bytearray()

    def hear(samples: int, count: int, _: int) -> int:
        if count > 0:
            heard.extend(ctypes.string_at(samples, count * 2))
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(hear)
    library.espeak_SetSynthCallback(callback)
    library.espeak_SetVoiceByName(b"en-us")
    library.espeak_SetParameter(RATE_PARAMETER, WORDS_A_MINUTE, 0)
    data = text.encode() + b"\0"
    library.espeak_Synth(data, len(data), 0, 0, 0, UTF8, None, None)
    library.espeak_Synchronize()
    return rate_hz.to_bytes(4, "little") + bytes(heard)


if __name__ == "__main__":
    sys.stdout.buffer.write(_say(sys.argv[1]))
