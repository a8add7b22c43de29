"""The text of PDFs, page by page. What is on them as pictures is not text."""

import logging
from typing import BinaryIO, Final

import pypdf
from pypdf.errors import DependencyError

from headwater.actors.media.decoders.formats import PDF
from headwater.actors.media.decoders.image_size import malformed
from headwater.actors.media.decoders.text import CONTROLS, check_text_length
from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import FileLimits

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
    found = CONTROLS.sub("", PAGE_END.join(text for text in texts if text))
    if not found:
        raise MediaError(
            MediaCode.NO_TEXT,
            "The PDF has no text, as scans have none. Send its pages as images, or convert it to text.",
        )
    return found


def _unlocked(reader: pypdf.PdfReader) -> bool:
    """Whether it opens without a password, as files that only forbid printing do."""
    try:
        return bool(reader.decrypt(""))
    except DependencyError:
        return False
