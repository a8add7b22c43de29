"""Which conversations a chat template renders without losing a word, with Headwater and with vLLM.

python -m tests.templates.judge --templates FOLDER [--aside] [--without-vllm]
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from headwater.actors.edge.chat_template import ChatTemplate, LiteralText
from headwater.actors.edge.prompt.prompts import render
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.engines.model_files import byte_tokenizer
from tests.templates.conversations import OFFERED, PLAIN, Conversation, as_chat, request_of
from tests.templates.sent_chats import CHATS
from tests.templates.sent_others import MESSAGES, RESPONSES
from tests.templates.shapes import SHAPES

SPECIAL: Final = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
LEAKS: Final = ("None", "null", "Undefined", "{'type': 'text'")
OWN_NULL: Final = '"is_error": null'
"""What Cohere's templates write with each result."""

TOGETHER: Final = "two texts run into one word"

UNEXPLAINED: Final = "refused the messages."
"""Ends a refusal that does not say why."""

CONVERSATIONS: Final[dict[str, Conversation]] = {
    **{name: as_chat(shape) for name, shape in SHAPES.items()},
    **CHATS,
    **RESPONSES,
    **MESSAGES,
}

ASIDE: Final = frozenset(
    {"assistant in parts", "results out of order", "responses: commentary", "messages: text between results"}
)
TEMPLATES_ASIDE: Final = frozenset(
    {
        "Kimi-K2-Thinking",
        "Qwen3-Coder",
        "deepseek-ai-DeepSeek-V3.2",
        "llama-cpp-rwkv-world",
        "openai-gpt-oss-120b",
    }
)
"""Chosen before any result of the conversations beyond `SHAPES` was seen, and counted on their own."""

Render = Callable[[Conversation], str]
"""Raises an exception where there is no prompt."""


class Cell(NamedTuple):
    """What is wrong with the prompt of a conversation by a template: empty for nothing. `vllm` is None where it was not asked."""

    template: str
    shape: str
    problem: str
    vllm: str | None = None

    @property
    def aside(self) -> bool:
        """Is it one of those that are counted on their own?"""
        return self.template in TEMPLATES_ASIDE or self.shape in ASIDE


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer().to_str().encode())


def renders(template: ChatTemplate) -> Render:

    def rendered(given: Conversation) -> str:
        return render(request_of(given), template, LiteralText(_tokenizer()), True)

    return rendered


def judge(rendered: Render, given: Conversation, *, images: bool = True) -> str:
    """What is wrong with the prompt; empty for one that has every word in its order and no sign of a missing value.

    `images`: the template has a place for them. Otherwise the model takes none, and the edge refuses the request before it renders it.
    """
    if given.images and not images:
        return ""
    try:
        text = rendered(given).replace(OWN_NULL, "")
    except Exception as error:
        return "" if given.refusable and not str(error).endswith(UNEXPLAINED) else f"refused: {error}"
    if given.images and not places(rendered, given):
        return ""
    without = _without_values(rendered, bool(given.body.get("tools")))
    for leak in LEAKS:
        # What a tool returned may well have one.
        allowed = without.count(leak) + str(given.body).count(f'": {leak}')
        if text.count(leak) > allowed:
            return f"{leak!r} in the prompt"
    if given.ends and not text.endswith(given.ends):
        return f"it does not end in {given.ends!r} but in {text[-40:]!r}"
    joined = next((one + other for one, other in pairwise(given.words) if one + other in text), "")
    if joined:
        return f"{joined!r}: {TOGETHER}"
    problem = _missing(text, given.words)
    return "" if any(not _missing(text, words) for words in given.others) else problem


@cache
def _without_values(rendered: Render, tools: bool) -> str:
    """The prompt of a plain message, to compare with."""
    return rendered(OFFERED if tools else PLAIN)


def places(rendered: Render, given: Conversation) -> bool:
    """Is the image of a conversation in its prompt? If not, the edge refuses the request: it finds no token that stands for the image."""
    text = rendered(given)
    if "{'type': 'image'" in text:
        return False
    return text != rendered(given._replace(body=_without_images(given.body)))


def _without_images(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_images(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_images(one) for one in value if not _is_image(one)]
    return value


def _is_image(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in ("image", "image_url", "input_image")


def _missing(text: str, words: tuple[str, ...]) -> str:
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return f"{word!r} is {'not in its place' if word in text else 'lost'}"
        at += len(word)
    return ""


def cells(folder: Path, *, vllm: bool = False) -> Iterator[Cell]:
    """Each template of a folder and each conversation. `vllm`: its prompts too."""
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text()
        ours = renders(ChatTemplate(source, SPECIAL))
        theirs = _vllm(source) if vllm else None
        for name, given in CONVERSATIONS.items():
            images = "image" in source
            other = None
            if theirs is not None and not given.images:
                other = judge(theirs, given)
            yield Cell(path.stem, name, judge(ours, given, images=images), other)


def _vllm(source: str) -> Render:
    from tests.templates.vllm_prompt import VllmTemplate

    return VllmTemplate(source, SPECIAL).render


def _share(found: list[Cell], label: str) -> str:
    compared = [cell for cell in found if cell.vllm is not None]
    right = sum(not cell.problem for cell in found)
    text = f"{label}: Headwater {right} of {len(found)} right ({right / max(1, len(found)):.1%})"
    if compared:
        theirs = sum(not cell.vllm for cell in compared)
        ours = sum(not cell.problem for cell in compared)
        text += (
            f"; of the {len(compared)} without images Headwater {ours} ({ours / len(compared):.1%}),"
            f" vLLM {theirs} ({theirs / len(compared):.1%})"
        )
    return text


def _print(wrong: Iterable[Cell]) -> None:
    """Each cell, and how many of a conversation have only words that run together."""
    together: Counter[str] = Counter()
    for cell in wrong:
        if cell.problem.endswith(TOGETHER):
            together[cell.shape] += 1
            continue
        vllm = "" if cell.vllm is None else f" | vLLM: {cell.vllm or 'right'}"
        print(f"  {cell.template} | {cell.shape} | {cell.problem}{vllm}")
    for shape, count in together.items():
        print(f"  {count} templates | {shape} | {TOGETHER}")


def main() -> int:
    """Print each cell that is wrong, with what vLLM makes of it, and the shares that are right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--templates", type=Path, required=True, help="a folder of *.jinja files")
    parser.add_argument(
        "--aside", action="store_true", help="also the conversations and templates kept aside"
    )
    parser.add_argument("--without-vllm", action="store_true", help="Headwater only")
    given = parser.parse_args()
    found = list(cells(given.templates, vllm=not given.without_vllm))
    shown = [cell for cell in found if given.aside or not cell.aside]
    _print(cell for cell in shown if cell.problem)
    print(f"{len({cell.template for cell in found})} templates, {len(CONVERSATIONS)} conversations")
    print(_share([cell for cell in found if not cell.aside], "not aside"))
    if given.aside:
        print(_share([cell for cell in found if cell.aside], "kept aside"))
    worse = [cell for cell in shown if cell.problem and cell.vllm == ""]
    print(f"right with vLLM and wrong with Headwater: {len(worse)}")
    _print(worse)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
