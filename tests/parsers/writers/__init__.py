"""Writers: each writes answers as the models of one family write them.

What they write is taken from the families' chat templates, which render calls of the history, and from the documentation and the tests of
vLLM's and SGLang's parsers.
"""

from collections.abc import Mapping
from typing import Final

from tests.parsers.writers.json_objects import JSON_WRITERS
from tests.parsers.writers.markup import MARKUP_WRITERS
from tests.parsers.writers.notations import NOTATION_WRITERS
from tests.parsers.writers.writer import Writer

WRITERS: Final[Mapping[str, Writer]] = {
    writer.name: writer for writer in (*JSON_WRITERS, *MARKUP_WRITERS, *NOTATION_WRITERS)
}

FIRST: Final[Mapping[str, str]] = {
    writer.tool_format: name for name, writer in reversed(list(WRITERS.items()))
}
"""One writer of each format."""
