"""Files of messages to what models take: text in UTF-8, or the pixels of an image.

The first bytes of PDFs and images say what they are. Text is whatever is UTF-8 without control characters: names and declared types do not count.
"""

from codecs import BOM_UTF8, getincrementaldecoder
from typing import BinaryIO

from headwater.actors.media.decoders.formats import HEAD_BYTES, PDF, TEXT, check_format, format_of
from headwater.actors.media.decoders.result import DecodedMedia, Sink
from headwater.actors.media.decoders.text import CONTROLS, check_text_length
from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import FileLimits, MediaLimits


def decode_document(file: BinaryIO, limits: MediaLimits, out: Sink) -> DecodedMedia:
    """Write text, shape (bytes,), or an image as `decode_image` does. Raises `MediaError`, and ImportError without the extra `media`."""
    head = file.read(HEAD_BYTES)
    form = format_of(head)
    file.seek(0)
    if form is not None and "image" in form.kinds:
        from headwater.actors.media.decoders.image import decode_image

        return decode_image(file, form, limits.image, out)
    if form is PDF:
        from headwater.actors.media.decoders.pdf import pdf_text

        return _written(pdf_text(file, limits.file), PDF.name, limits.file, out)
    text = _plain_text(file, limits.file)
    if text is None:
        # Some texts begin as other formats do, so that these are only named now.
        if form is not None:
            check_format(head, "file")
        raise MediaError(
            MediaCode.UNKNOWN_TYPE,
            "The file is neither text in UTF-8, nor a PDF, nor an image. Convert it to one of these.",
        )
    return _written(text, TEXT.name, limits.file, out)


def _plain_text(file: BinaryIO, limits: FileLimits) -> str | None:
    """The file if it is text, with its lines ended as models know them. Raises `MediaError` if that is too long."""
    data = file.read(limits.text_bytes_max + len(BOM_UTF8) + 1).removeprefix(BOM_UTF8)
    is_whole = len(data) <= limits.text_bytes_max
    try:
        text = getincrementaldecoder("utf-8")().decode(data, is_whole)
    except UnicodeDecodeError:
        return None
    if CONTROLS.search(text):
        return None
    check_text_length(len(data), limits)
    return text.replace("\r\n", "\n")


def _written(text: str, name: str, limits: FileLimits, out: Sink) -> DecodedMedia:
    data = text.encode("utf-8", "replace")
    if not data:
        raise MediaError(MediaCode.EMPTY, "The file has no text.")
    check_text_length(len(data), limits)
    out.write(data)
    return DecodedMedia("uint8", (len(data),), name)
