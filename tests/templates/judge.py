"""Which conversations a chat template renders without losing a word.

python -m tests.templates.judge --templates FOLDER
"""

import argparse
import sys
from pathlib import Path

from headwater.actors.edge.generation.prompts import render
from headwater.actors.edge.generation.request import GenerationRequest
from headwater.actors.edge.model.chat_template import ChatTemplate
from headwater.actors.http.errors import ApiError
from tests.templates.shapes import SHAPES, Shape

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
LEAKS = ("None", "null", "Undefined")


def judge(template: ChatTemplate, shape: Shape) -> str:
    """What is wrong with the prompt; empty for one that has every word in its order and no sign of a missing value."""
    request = GenerationRequest(model="m", param="messages", messages=shape.turns, tools=shape.tools)
    try:
        text = render(request, template)
    except ApiError as error:
        return f"refused: {error}"
    without = render(GenerationRequest(model="m", param="messages", messages=SHAPES["plain"].turns), template)
    if shape.tools:
        offered = GenerationRequest(
            model="m", param="messages", messages=SHAPES["plain"].turns, tools=shape.tools
        )
        without = render(offered, template)
    for leak in LEAKS:
        if text.count(leak) > without.count(leak):
            return f"{leak!r} in the prompt"
    problem = _missing(text, shape.words)
    return _missing(text, shape.other) if problem and shape.other else problem


def _missing(text: str, words: tuple[str, ...]) -> str:
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return f"{word!r} is {'not in its place' if word in text else 'lost'}"
    return ""


def cells(folder: Path) -> list[tuple[str, str, str]]:
    """What is wrong with each template of a folder and each shape: name, shape, problem (empty: nothing)."""
    found = []
    for path in sorted(folder.glob("*.jinja")):
        template = ChatTemplate(path.read_text(), SPECIAL)
        for name, shape in SHAPES.items():
            try:
                problem = judge(template, shape)
            except ApiError as error:
                problem = f"not even a plain message: {error}"
            found.append((path.stem, name, problem))
    return found


def main() -> int:
    """Print each cell that is wrong, and the share that is right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--templates", type=Path, required=True, help="a folder of *.jinja files")
    found = cells(parser.parse_args().templates)
    wrong = [cell for cell in found if cell[2]]
    for cell in wrong:
        print(" | ".join(cell))
    templates = len({name for name, _, _ in found})
    right = len(found) - len(wrong)
    print(
        f"{templates} templates x {len(SHAPES)} shapes: {right} of {len(found)} right ({right / max(1, len(found)):.1%})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
