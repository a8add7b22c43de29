"""Prints what a release of SGLang lacks of the parameters that the adapter uses, read from its wheel without an import.

python -m tests.support.sglang.record sglang-0.5.17-*.whl …
"""

import ast
import re
import sys
import zipfile
from pathlib import Path

from headwater.engines.sglang.signatures import MODULES, USED, missing

INHERITED = ("TokenizerControlMixin", "TokenizerCommunicatorMixin", "TokenizerManagerMultiItemMixin")
PLACES = (
    "sglang/srt/managers/tokenizer_control_mixin.py",
    "sglang/srt/managers/tokenizer_communicator_mixin.py",
)


def lacks(wheel: Path) -> dict[str, tuple[str, ...]]:
    """By call: the parameters that this wheel does not have."""
    found: dict[str, tuple[str, ...]] = {}
    with zipfile.ZipFile(wheel) as files:
        for name, used in USED.items():
            owner, _, method = name.partition(".")
            source = MODULES[owner].replace(".", "/") + ".py"
            places = [source, *PLACES] if method else [source]
            there: tuple[str, ...] = ()
            for place in places:
                if place in files.namelist():
                    there = there or _names(ast.parse(files.read(place)), owner, method)
            absent = missing(used, there)
            if absent:
                found[name] = absent
    return found


def _names(tree: ast.Module, owner: str, method: str) -> tuple[str, ...]:
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if not method:
        return _fields(classes, owner)
    for node in classes.values():
        for one in node.body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == method:
                arguments = (*one.args.args, *one.args.kwonlyargs)
                return tuple(argument.arg for argument in arguments)
    return ()


def _fields(classes: dict[str, ast.ClassDef], name: str) -> tuple[str, ...]:
    node = classes.get(name)
    if node is None:
        return ()
    own = [
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]
    above = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return (*own, *(field for base in above for field in _fields(classes, base)))


def main() -> None:
    """Print one entry of the table for each wheel."""
    for path in map(Path, sys.argv[1:]):
        version = re.match(r"sglang-([^-]+)-", path.name)
        print(f'    "{version[1] if version else path.name}": {lacks(path)!r},')


if __name__ == "__main__":
    main()
