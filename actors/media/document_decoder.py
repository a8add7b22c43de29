"""Decoding of files in messages: text in UTF-8, or the pixels of an image.

The first bytes of PDFs and images say what they are. Text is whatever is UTF-8 without control characters: names and declared types do not count.
"""

import logging
import re
from codecs import BOM_UTF8, getincrementaldecoder
from typing import BinaryIO, Final

import pypdf
from pypdf.errors import DependencyError

from headwater.actors.media.image_decoder import malformed
from headwater.actors.media.request import (
    HEAD_BYTES,
    PDF,
    TEXT,
    DecodedMedia,
    FileLimits,
    MediaCode,
    MediaError,
    MediaLimits,
    Sink,
    check_format,
    format_of,
)

CONTROLS: Final = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
"""No text has them; escape sequences of terminals are in logs, form feeds in old documents."""


def check_text_length(size: int, limits: FileLimits) -> None:
    """Raises `MediaError` for `size` bytes of text that are too many."""
    if size > limits.text_bytes_max:
        raise MediaError(
            MediaCode.TOO_MUCH_TEXT,
            f"The text of the file has {size} bytes or more; at most {limits.text_bytes_max} are accepted. Send a part of it.",
        )


# Files of all kinds.


def decode_document(file: BinaryIO, limits: MediaLimits, out: Sink) -> DecodedMedia:
    """Write text, shape (bytes,), or an image as `decode_image` does. Raises `MediaError`, and ImportError without the extra `media`."""
    head = file.read(HEAD_BYTES)
    form = format_of(head)
    file.seek(0)
    if form is not None and "image" in form.kinds:
        from headwater.actors.media.image_decoder import decode_image

        return decode_image(file, form, limits.image, out)
    if form is PDF:
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


# The text of PDFs, page by page, without the pictures on them.

PAGE_END: Final = "\n\n"


def pdf_text(file: BinaryIO, limits: FileLimits) -> str:
    """The text of all pages. Raises `MediaError`."""
    # It warns of every flaw that it corrects; a hostile file has millions.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        reader = pypdf.PdfReader(file)
        if reader.is_encrypted and not _unlocked(reader):
            raise MediaError(
                MediaCode.ENCRYPTED, "The PDF is encrypted. Send it without a password, or as text."
            )
        pages = reader.get_num_pages()
        if pages > limits.pages_max:
            raise MediaError(
                MediaCode.TOO_MANY_PAGES,
                f"The PDF has {pages} pages; at most {limits.pages_max} are accepted. Send the pages that matter.",
            )
        texts: list[str] = []
        size = 0
        for page in reader.pages:
            text = page.extract_text().strip()
            size += len(text)
            check_text_length(size, limits)
            texts.append(text)
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        # The library names few of the errors that broken files cause in it.
        raise malformed(PDF, "its pages cannot be read") from error
    document = CONTROLS.sub("", PAGE_END.join(text for text in texts if text))
    if not document:
        raise MediaError(
            MediaCode.NO_TEXT,
            "The PDF has no text, as scans have none. Send its pages as images, or convert it to text.",
        )
    return document


def _unlocked(reader: pypdf.PdfReader) -> bool:
    """Return whether the file opens without a password, as files that only forbid printing do."""
    try:
        return bool(reader.decrypt(""))
    except DependencyError:
        return False
