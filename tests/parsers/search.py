"""The shortest texts that break a property, by family and kind of fault.

python -m tests.parsers.search [--examples 2000] [--claim TEXT] [FAMILY ...]
"""

import argparse
import re
from collections import Counter

from tests.parsers.examples import source
from tests.parsers.properties import PROPERTIES, Fault
from tests.parsers.writers import WRITERS

_VALUE = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+|\{.*\}|\[.*\]""", re.DOTALL)


def kind_of(fault: Fault) -> str:
    subject, found, rest = fault.problem.partition(" is ")
    if found:
        return f"{subject if subject in ('reasoning', 'text', 'what') else 'a value'} is other than written"
    return _VALUE.sub("_", subject + rest)[:60]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.parsers.search")
    parser.add_argument("--examples", type=int, default=2_000, help="examples of each property and family")
    parser.add_argument("--claim", default="", help="only properties whose name has this text")
    parser.add_argument("families", nargs="*", default=[], help="families; all without any")
    options = parser.parse_args()
    for claim, broken in PROPERTIES.items():
        if options.claim not in claim:
            continue
        for name in options.families or WRITERS:
            shortest: dict[str, Fault] = {}
            counts: Counter[str] = Counter()
            for number in range(options.examples):
                fault = broken(WRITERS[name], source(claim, name, number))
                if fault is None:
                    continue
                kind = kind_of(fault)
                counts[kind] += 1
                if kind not in shortest or len(str(fault)) < len(str(shortest[kind])):
                    shortest[kind] = fault
            for kind, fault in shortest.items():
                print(f"{claim} | {name} | {counts[kind]} of {options.examples}\n{fault}\n", flush=True)


if __name__ == "__main__":
    main()
