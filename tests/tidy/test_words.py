"""Words that source and docs do not use: the glossary's former terms, and words that are not the field's English.

`ALLOWED` bounds how many are left in a package or its first sub-package. A bound may be lowered, never raised; what is
not named has none left.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.source import AREAS, ROOT

GLOSSARY = ROOT / "docs" / "concepts" / "glossary.md"
GENERATED = ROOT / "docs" / "reference"
"""Written from the source, where their words are counted."""

EXAMPLES = (".md", ".py", ".toml", ".yaml", ".service", ".conf")

WORDS = {
    r"told|tell|tells|telling|untold": "publish, report, notify, state",
    r"nobody|somebody|anybody|whoever": "name the process or the client",
    r"anew": "again, re-",
    r"mend|mends|mended|mending": "fix, repair, hint",
    r"beside": "next to, in addition to",
    r"can not": "cannot",
    r"for ever": "indefinitely, until cancelled",
    r"meanwhile": "in the meantime, while",
    r"goes on|go on|going on|went on": "continue, resume, migrate",
    r"what it holds": "its contents, its cached blocks",
    r"undertaker|bury|buries|buried": "revoke, reap",
    r"wish|wishes|wished": "routing hints, constraints",
    r"hopeless": "unrecoverable",
    r"forsake|forsakes|forsaken": "abandon",
    r"makeshift": "fallback",
    r"smuggle|smuggled": "mismatch",
    r"door": "admission queue",
    r"waiting room": "admission queue",
    r"gathered": "burst",
    r"placing": "dispatch",
    r"belief|beliefs": "expected blocks, credit",
    r"engine actor": "worker",
}
"""Regular expression: what to write instead. Names count as words too: `_told`, `WaitingRoom`."""

CONTEXTUAL = {
    "work": "also the coroutine or the load that something takes",
    "move": "also copying KV between workers",
    "go on elsewhere": "covered by `go on`",
    "announce anew": "covered by `anew`",
    "adapter": "also LoRA adapter, in prose",
    "adapter (alone)": "also LoRA adapter, in prose",
    "life": "also the lifetime of an object",
    "world": "also the Python protocol of tests",
    "needs": "also the verb",
    "wants": "also the verb",
    "anyway": "also the adverb",
    "shape": "also of arrays",
    "busy": "also the adjective",
    "assumed": "also the adjective",
    "gateway": "also the API that deployments put in front",
}
"""The glossary's former terms that are ordinary words as well, so that a reader must judge them."""

ALLOWED: dict[str, int] = {
    # The page shows commits of before.
    "docs/contributing": 2,
    # A command that was renamed.
    "CHANGELOG.md": 1,
    # Names of fields in stored snapshots.
    "router/fold": 2,
}

_PATTERN = re.compile(
    "|".join(rf"(?P<w{number}>\b(?:{words})\b)" for number, words in enumerate(WORDS)), re.I
)
_ANY = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")
"""The same without groups and for lower case: twenty times as fast where nothing is found."""

_NAME_PARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_")
_FILE_POSITION = re.compile(r"\.tell\(\)")


def files() -> Iterator[Path]:
    """Source, docs and examples, without the tests."""
    for area in AREAS:
        yield from sorted((ROOT / area).rglob("*.py"))
    pages = sorted((ROOT / "docs").rglob("*.md"))
    yield from (path for path in pages if path != GLOSSARY and GENERATED not in path.parents)
    yield from (ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))
    examples = (ROOT / "examples").rglob("*")
    yield from sorted(path for path in examples if path.suffix in EXAMPLES)


def found_in(text: str) -> Iterator[tuple[int, str, str]]:
    """(line number, word, what to write instead)."""
    hints = list(WORDS.values())
    if not _ANY.search(_plain(text).lower()):
        return
    for number, line in enumerate(text.splitlines(), 1):
        for match in _PATTERN.finditer(_plain(line)):
            assert match.lastgroup is not None
            yield number, match.group().lower(), hints[int(match.lastgroup[1:])]


def _plain(text: str) -> str:
    """Text with the words of names apart."""
    return _NAME_PARTS.sub(" ", _FILE_POSITION.sub("", text))


def by_folder() -> dict[str, list[str]]:
    """What is found, by package and sub-package."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in files():
        name = path.relative_to(ROOT)
        for number, word, hint in found_in(path.read_text()):
            found["/".join(name.parts[:2] if len(name.parts) > 2 else name.parts[:1])].append(
                f"{name}:{number}: {word!r}; write: {hint}"
            )
    return found


def test_no_folder_has_more_of_them_than_allowed() -> None:
    for folder, found in by_folder().items():
        allowed = ALLOWED.get(folder, 0)
        assert len(found) <= allowed, f"{folder}: {len(found)}, allowed {allowed}\n" + "\n".join(found)


def test_every_former_term_of_the_glossary_is_checked_or_left_to_the_reader() -> None:
    rows = [line.split("|") for line in GLOSSARY.read_text().splitlines() if line.startswith("|")][2:]
    former = [term.strip() for row in rows for term in row[-2].split(",") if term.strip()]
    assert former
    for term in former:
        assert term in CONTEXTUAL or list(found_in(term)), f"{term}: neither in WORDS nor in CONTEXTUAL"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def _told(self): ...", ["told"]),
        ("class WaitingRoom:", ["waiting room"]),
        ("Nobody can not", ["nobody", "can not"]),
        ("file.tell()", []),
        ("retold foretells besides", []),
    ],
)
def test_names_are_taken_apart(text: str, words: list[str]) -> None:
    assert [word for _, word, _ in found_in(text)] == words
