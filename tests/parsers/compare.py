"""Headwater's parsers next to vLLM's and SGLang's, on the same texts.

python -m tests.parsers.compare [--cases 200] [--seed 1] [--list FILE] [FAMILY ...]

Each family writes random answers without reasoning, and the hard cases are added to their families. A parser is right about an answer if
it finds the calls that were written, with their arguments, and the text, whole and in pieces. SGLang runs in an environment of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.parsers.answers import Answer, ReadCall, Reading
from tests.parsers.hard_cases import HARD_CASES
from tests.parsers.judge import problem_of, read_written
from tests.parsers.vllm_reader import deltas_of
from tests.parsers.writers import WRITERS
from tests.parsers.writers.writer import Written, draw_written

ROOT = Path(__file__).parents[2]

PYTHONS = {"vllm": sys.executable, "sglang": str(ROOT / ".sglang" / "bin" / "python")}

SIZES = ((1,), (3,), (5, 1, 9), (40,))
"""Sizes of pieces, in characters and markers."""


class Case(NamedTuple):
    """A text, and how it is cut for streams."""

    written: Written
    sizes: tuple[int, ...]
    name: str = ""

    @property
    def pieces(self) -> list[str]:
        return deltas_of(self.written.text, list(self.sizes), self.written.writer.tokens)


def cases_of(name: str, count: int, seed: int) -> list[Case]:
    """Random answers of a family, and its hard cases."""
    writer = WRITERS[name]
    found = []
    for number in range(count):
        rnd = Random(f"{name} {seed} {number}")
        drawn = draw_written(writer, rnd)
        answer = Answer("", drawn.answer.parts)
        written = drawn._replace(answer=answer, text=writer.write(answer, rnd))
        found.append(Case(written, SIZES[number % len(SIZES)]))
    hard = [one for one in HARD_CASES if one.family == name and one.comparable]
    return found + [Case(one.written, SIZES[0], one.name) for one in hard]


def problems_of_headwater(case: Case) -> str:
    """What is wrong with Headwater's readings; "" for nothing."""
    for pieces in ([case.written.text], case.pieces):
        if problem := problem_of(case.written, read_written(case.written, pieces), places=False):
            return problem
    return ""


def problems_of_others(server: str, cases: Sequence[Case]) -> list[str]:
    """What is wrong with another server's readings, by case; "" for nothing. "-" for cases that it has no parser for."""
    chosen = [case for case in cases if getattr(case.written.writer, server)]
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder, "cases.json"), Path(folder, "results.json")
        given.write_text(json.dumps([_as_json(case) for case in chosen]))
        command = [PYTHONS[server], "-m", f"tests.parsers.{server}_reader", str(given), str(results)]
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "CRITICAL"}
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        readings = iter(json.loads(results.read_text()))
    return [_problem(case, next(readings)) if getattr(case.written.writer, server) else "-" for case in cases]


def _as_json(case: Case) -> dict[str, Any]:
    written = case.written
    return {
        "vllm": written.writer.vllm,
        "sglang": written.writer.sglang,
        "tools": written.tools,
        "text": written.text,
        "sizes": case.sizes,
        "tokens": written.writer.tokens,
        "pieces": case.pieces,
    }


def _problem(case: Case, readings: dict[str, dict[str, Any]]) -> str:
    for way, found in readings.items():
        if "error" in found:
            return "-" if found["error"].startswith("ImportError") else f"{way}: {found['error']}"
        calls = [ReadCall(name, arguments, complete=True) for name, arguments in found["calls"]]
        text = found["text"].strip()
        reading = Reading("", (*([text] if text else []), *calls))
        if problem := problem_of(case.written, reading, places=False):
            return f"{way}: {problem}"
    return ""


def _share(problems: Sequence[str], places: Sequence[int]) -> str:
    """How many answers a parser is right about, and in brackets of how many it has the calls right, whatever became of the text."""
    found = [problems[place] for place in places]
    if "-" in found:
        return "-"
    right = sum(not problem for problem in found)
    calls = sum(not problem or "text is " in problem for problem in found)
    return f"{right} ({calls})"


def main() -> None:
    """Print the table, and the cases in which another is right and Headwater is not."""
    parser = argparse.ArgumentParser(prog="python -m tests.parsers.compare")
    parser.add_argument("--cases", type=int, default=200, help="random answers of each family")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", type=Path, help="a file for all faults of all three")
    parser.add_argument("families", nargs="*", help="families; all without any")
    options = parser.parse_args()
    cases = [
        case for name in options.families or WRITERS for case in cases_of(name, options.cases, options.seed)
    ]
    ours = [problems_of_headwater(case) for case in cases]
    vllm, sglang = problems_of_others("vllm", cases), problems_of_others("sglang", cases)
    print(f"{'family':24} {'cases':>6} {'Headwater':>12} {'vLLM':>12} {'SGLang':>12}   (calls alone)")
    for name in options.families or WRITERS:
        places = [place for place, case in enumerate(cases) if case.written.writer.name == name]
        print(
            f"{name:24} {len(places):>6} {_share(ours, places):>12} {_share(vllm, places):>12} {_share(sglang, places):>12}"
        )
    print("\nAnother is right and Headwater is not:\n")
    faults = []
    for case, one, two, three in zip(cases, ours, vllm, sglang):
        row = (
            f"{case.written.writer.name} {case.name}\n  Headwater: {one or 'right'}\n  vLLM: {two or 'right'}\n"
            f"  SGLang: {three or 'right'}\n  text: {case.written.text!r}\n  tools: {json.dumps(case.written.tools)}\n"
        )
        if one and (not two or not three):
            print(row)
        if one or two or three:
            faults.append(row)
    if options.list is not None:
        options.list.write_text("\n".join(faults))


if __name__ == "__main__":
    main()
