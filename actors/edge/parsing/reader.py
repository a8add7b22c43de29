"""Reading from text that arrives in pieces."""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Final, TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""A step of a grammar that returns T: it yields whenever it needs more text."""

Write = Callable[[str], None]

WHITESPACE: Final = " \t\r\n"

HEADER_MAX: Final = 2_048
"""Characters of a call's header (its name, its id); with more it is not one."""

_SPACE: Final = re.compile(r"[ \t\r\n]*")


class Markers:
    """A set of literals that is searched for in text. Where one is the beginning of another, the longer one wins."""

    __slots__ = ("_longer", "_one_first", "_pattern", "_start", "_tail_max", "literals")

    def __init__(self, literals: tuple[str, ...]) -> None:
        self.literals: Final = tuple(sorted(set(literals), key=lambda literal: (-len(literal), literal)))
        self._pattern: Final = re.compile("|".join(map(re.escape, self.literals)) or r"(?!)")
        firsts = sorted({literal[0] for literal in self.literals})
        self._one_first: Final = firsts[0] if len(firsts) == 1 else ""
        self._start: Final = re.compile("[" + "".join(map(re.escape, firsts)) + "]" if firsts else r"(?!)")
        self._tail_max: Final = max(map(len, self.literals), default=1) - 1
        self._longer: Final = {
            short: tuple(long for long in self.literals if long != short and long.startswith(short))
            for short in self.literals
        }

    def find(self, text: str, at: int, *, ended: bool) -> tuple[int, str]:
        """Return how far `text` is free of markers, from `at` on, and the marker there ("" if none is complete)."""
        if self._one_first:
            if text.find(self._one_first, at) < 0:
                return len(text), ""
        elif self._start.search(text, at) is None:
            return len(text), ""
        match = self._pattern.search(text, at)
        if match is not None:
            start, marker = match.start(), match.group()
            if not ended and any(
                long.startswith(text[start : start + len(long)]) for long in self._longer[marker]
            ):
                return start, ""
            return start, marker
        return (len(text) if ended else self.find_cut(text, at)), ""

    def is_longer(self, text: str, marker: str, at: int) -> bool:
        """Return whether the marker at `at` may be a longer one that the end of `text` cuts."""
        rest = text[at:]
        return any(long.startswith(rest) for long in self._longer[marker])

    def find_cut(self, text: str, at: int) -> int:
        """Return where a marker begins that the end of `text` cuts, its length for none."""
        at = max(at, len(text) - self._tail_max)
        while (start := self._start.search(text, at)) is not None:
            at = start.start()
            rest = text[at:]
            if any(literal.startswith(rest) for literal in self.literals):
                return at
            at += 1
        return len(text)


@lru_cache(maxsize=1024)
def markers(*literals: str) -> Markers:
    """Return the set of these literals; formats are few, so each set is made once."""
    return Markers(literals)


class Reader:
    """The unread text of an answer: `text` from `at` on. `ended` says that no more comes."""

    __slots__ = ("_recorded", "_recording_from", "at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._recording_from = -1
        self._recorded: list[str] = []

    def feed(self, text: str) -> None:
        """Append the next piece."""
        if self._recording_from >= 0:
            self._recorded.append(self.text[self._recording_from : self.at])
            self._recording_from = 0
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    def record(self) -> None:
        """Keep what is read from here on, so that it can be given back."""
        self._recorded = []
        self._recording_from = self.at

    def take_record(self) -> str:
        """Return what was read since `record`, and keep no more."""
        if self._recording_from >= 0:
            self._recorded.append(self.text[self._recording_from : self.at])
        self._recording_from = -1
        recorded, self._recorded = "".join(self._recorded), []
        return recorded

    def take_record_back(self, kept_length: int) -> str:
        """Return the first `kept_length` characters since `record`, and have the others read again."""
        recorded = self.take_record()
        self.text = recorded[kept_length:] + self.text[self.at :]
        self.at = 0
        return recorded[:kept_length]

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def skip_space(self) -> Steps[str]:
        """Read whitespace and return what follows it, as `peek` does."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            yield

    def read_run(self, characters: re.Pattern[str]) -> Steps[str]:
        """Return the characters that follow, as far as the pattern matches them, but at most `HEADER_MAX` of them."""
        while True:
            match = characters.match(self.text, self.at, self.at + HEADER_MAX)
            end = match.end() if match is not None else self.at
            if end < len(self.text) or self.ended:
                break
            yield
        run = self.text[self.at : end]
        self.at = end
        return run

    def accept(self, markers: Markers) -> Steps[str]:
        """Read the marker that follows, if one does, and return it; otherwise read nothing and return ""."""
        marker = yield from self.look(markers)
        self.at += len(marker)
        return marker

    def look(self, markers: Markers) -> Steps[str]:
        """Return the marker that follows, "" if none does, and read nothing."""
        while (marker := self._starts_with(markers, self.at)) is None:
            yield
        return marker

    def accept_after_space(self, markers: Markers) -> Steps[str]:
        """Read whitespace and a marker, if they follow, and return the marker; otherwise read nothing.

        With more whitespace than `HEADER_MAX` no marker follows.
        """
        behind, marker = yield from self.find_after_space(markers)
        if marker:
            self.at += behind + len(marker)
        return marker

    def copy_after_space(self, markers: Markers, write: Write) -> Steps[str]:
        """Do what `accept_after_space` does, and write what was read."""
        behind, marker = yield from self.find_after_space(markers)
        if marker:
            end = self.at + behind + len(marker)
            write(self.text[self.at : end])
            self.at = end
        return marker

    def accept_end(self, markers: Markers) -> Steps[str]:
        """Do what `accept_after_space` does, and also read what the answer's end left of a marker, which is markup too."""
        marker = yield from self.accept_after_space(markers)
        if not marker:
            self.drop_cut(markers)
        return marker

    def drop_cut(self, markers: Markers) -> bool:
        """Read the rest of an answer that ended, if it is whitespace and the beginning of a marker; return whether it is."""
        cut = self.is_cut(markers)
        if cut:
            self.at = len(self.text)
        return cut

    def is_cut(self, markers: Markers) -> bool:
        """Return whether the answer has ended, and its rest is whitespace and the beginning of a marker."""
        if not self.ended:
            return False
        rest = self.text[self.at :].lstrip(WHITESPACE)
        return any(literal.startswith(rest) for literal in markers.literals)

    def look_after_space(self, markers: Markers) -> Steps[str]:
        """Return the marker that follows, perhaps after whitespace, as `accept_after_space` does, and read nothing."""
        _behind, marker = yield from self.find_after_space(markers)
        return marker

    def find_after_space(self, markers: Markers, behind: int = 0) -> Steps[tuple[int, str]]:
        """Do what `look_after_space` does, that many characters further on; and return how far on the marker, or whatever follows, begins."""
        while True:
            start = self.at + behind  # `feed` moves `at`
            found = _SPACE.match(self.text, start)
            assert found is not None
            end = found.end()
            if end - start > HEADER_MAX:
                return end - self.at, ""
            if end < len(self.text) or self.ended:
                marker = self._starts_with(markers, end)
                if marker is not None:
                    return end - self.at, marker
            yield

    def only_space_follows(self, behind: int = 0) -> bool:
        """Return whether the answer has ended, but for whitespace, that many characters further on."""
        return self.ended and not self.text[self.at + behind :].strip()

    def _starts_with(self, markers: Markers, at: int) -> str | None:
        """Return the marker at `at`, "" if none is there, None if that needs more text."""
        for literal in markers.literals:
            if self.text.startswith(literal, at):
                return literal
            if not self.ended and literal.startswith(self.text[at:]):
                return None
        return ""

    def copy_until(
        self, markers: Markers, write: Write, is_markup: Callable[[], bool] = lambda: False
    ) -> Steps[str]:
        """Write the text up to the next marker, read the marker and return it; "" if the answer ends first.

        The beginning of a marker that the answer's end cuts is text, unless `is_markup()` then.
        """
        while True:
            end, marker = markers.find(self.text, self.at, ended=self.ended)
            cut = markers.find_cut(self.text, self.at) if self.ended and not marker else end
            if cut > self.at:
                write(self.text[self.at : cut])
            if cut < end and not is_markup():
                write(self.text[cut:end])
            if marker and self.ended and markers.is_longer(self.text, marker, end) and is_markup():
                self.at = len(self.text)
                return ""
            self.at = end + len(marker)
            if marker or (self.ended and self.at >= len(self.text)):
                return marker
            yield

    def copy_value_until(self, markers: Markers, write: Write) -> Steps[str]:
        """Do what `copy_until` does within a value: the beginning of a marker at the answer's end is not part of it."""
        return (yield from self.copy_until(markers, write, lambda: True))

    def read_until(self, markers: Markers) -> Steps[tuple[str, str]]:
        """Return the text up to the next marker, and the marker, which is read too.

        The marker is "" if the answer ends first or more than `HEADER_MAX` characters pass.
        """
        pieces: list[str] = []
        room = HEADER_MAX
        while True:
            end, marker = markers.find(self.text, self.at, ended=self.ended)
            if end - self.at > room:
                end, marker = self.at + room, ""
            pieces.append(self.text[self.at : end])
            room -= end - self.at
            self.at = end + len(marker)
            if marker or not room or (self.ended and self.at >= len(self.text)):
                return "".join(pieces), marker
            yield
