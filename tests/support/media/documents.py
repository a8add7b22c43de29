"""PDFs for tests, written by hand: one line of text a page."""

from collections.abc import Sequence


def pdf(pages: Sequence[str], *, trailer: str = "") -> bytes:
    """A PDF with these lines; `trailer` are further entries of its trailer."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, line in enumerate(pages):
        content = f"BT /F1 12 Tf 72 720 Td ({line}) Tj ET" if line else ""
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            stream(content.encode()),
        ]
    return document(objects, trailer)


def stream(data: bytes, entries: str = "") -> str:
    """A stream as the text of an object."""
    return f"<< /Length {len(data)} {entries} >>\nstream\n{data.decode('latin-1')}\nendstream"


def document(objects: Sequence[str], trailer: str = "") -> bytes:
    """A file of these objects, numbered from 1, of which the first is the catalog."""
    data = b"%PDF-1.4\n"
    places = []
    for number, text in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{text}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    head = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    end = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + (head + end).encode()
