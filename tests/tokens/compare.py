"""Token ids and decoded texts of real vocabularies, compared with those of other libraries.

python -m tests.tokens.compare [--tokenizers FOLDER] [--templates FOLDER]

`--tokenizers` is what `make tokenizers` makes, `--templates` what `make templates` does. Mistral's vocabularies come with mistral_common.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from openai_harmony import HarmonyEncodingName, load_harmony_encoding
from tokenizers import Tokenizer as Reference
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.mistral import convert_tekken_tokenizer

from headwater.actors.edge.chat_template import ChatTemplate, LiteralText
from headwater.actors.edge.prompt.conversation import template_messages
from headwater.actors.edge.prompt.prompts import render
from headwater.actors.edge.prompt.request import GenerationRequest
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.ops.start import model as start_model
from tests.templates.conversations import CONVERSATIONS_OF_TEXT, request_of
from tests.tokens.vocabularies import MISTRAL_DATA, names_of, real, settings, write_o200k

TEXTS: Final = (
    "Hello world",
    " Hello",
    "  Hello  ",
    "\nHello\n\n",
    "Hello  world ",
    "▁world a▁b",
    "naïve café",
    "漢字とかな 한국어 العربية",
    "🙂👩‍👩‍👧‍👦",
    "e\u0301 \u1e9b\u0323",
    "\u200b\ufeff",
    "\x00\x01\x7f",
    "<0x41>",
    "def f(x):\n\treturn x ** 2  # ½",
    "١٢٣ 123456789",
    "\r\n\r\n",
    "ﬁ ½ Å",
    "𒀀𓂀 \U0010ffff",
    "<|im_start|>user <s> </s> <bos> [INST] <|start|>system",
    "a" * 3_000,
    "",
)
TEMPLATE_OF: Final = {"gptoss": "openai-gpt-oss-120b", "deepseek": "deepseek-ai-DeepSeek-V3.1"}
"""Of llama.cpp's distribution, where a vocabulary comes without one."""

RANDOM: Final = 300


class Row(NamedTuple):
    """A line of the table: how many of the cases agree, and the first that does not."""

    vocabulary: str
    compared: str
    right: int
    cases: int
    example: str = ""


def _row(vocabulary: str, compared: str, cases: Iterator[tuple[str, object, object]]) -> Row:
    found = list(cases)
    wrong = [
        f"{name}: {str(ours)[:60]} <> {str(theirs)[:60]}" for name, ours, theirs in found if ours != theirs
    ]
    return Row(vocabulary, compared, len(found) - len(wrong), len(found), wrong[0] if wrong else "")


def _encoded(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    return list(asyncio.run(tokenizer.encode(text, add_special_tokens=special)).tolist())


def texts(name: str, tokenizer: Tokenizer) -> Iterator[Row]:
    """Against Hugging Face's tokenizers: ids, and decoding token by token."""
    reference = tokenizer.reference

    def ids() -> Iterator[tuple[str, object, object]]:
        for text in TEXTS:
            for special in (False, True):
                theirs = reference.encode(text, add_special_tokens=special).ids
                yield repr(text)[:30], _encoded(tokenizer, text, special=special), theirs

    yield _row(name, "ids: tokenizers", ids())
    yield _row(name, "stream: whole text", _streams(tokenizer))
    yield _row(name, "stream: behind a prompt", _behind_prompts(tokenizer))

    def plain() -> Iterator[tuple[str, object, object]]:
        for token in sorted(tokenizer.special)[:200]:
            spelled = reference.id_to_token(token) or ""
            found = set(tokenizer.encode_plain(spelled).tolist()) & set(tokenizer.special)
            yield spelled, found, set()

    yield _row(name, "control tokens spelled", plain())
    yield _row(name, "spelled within a word", _within_words(tokenizer))


def _within_words(tokenizer: Tokenizer) -> Iterator[tuple[str, object, object]]:
    """A message that spells a control token is the same text to the model as any other."""
    whole = Reference.from_str(tokenizer.reference.to_str())
    whole.encode_special_tokens = True
    for token in sorted(tokenizer.special)[:60]:
        text = f"a{tokenizer.reference.id_to_token(token)}b"
        literal = LiteralText(tokenizer)
        ids = asyncio.run(literal.encode(literal.mark(text), add_special_tokens=False)).tolist()
        wanted = whole.encode(text, add_special_tokens=False).ids
        yield (
            text,
            whole.decode(ids, skip_special_tokens=False),
            whole.decode(wanted, skip_special_tokens=False),
        )


def harmony(folder: Path) -> Iterator[Row]:
    """Against OpenAI's own encoder of gpt-oss."""
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(write_o200k(folder / "gptoss" / "tokenizer.json"))
    theirs = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    ours = real(folder, "gptoss")
    cases = (
        (repr(text)[:30], ours.encode_plain(text).tolist(), theirs.encode(text, disallowed_special=()))
        for text in TEXTS
    )
    yield _row("gptoss", "ids: openai-harmony", cases)


def _answers(tokenizer: Tokenizer) -> Iterator[list[int]]:
    draw = random.Random(1)
    for text in TEXTS:
        yield tokenizer.reference.encode(text, add_special_tokens=False).ids
    for _ in range(RANDOM):
        yield [draw.randrange(tokenizer.vocabulary) for _ in range(draw.choice((1, 2, 3, 8, 40)))]


def _streamed(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    decoder = tokenizer.decoder(prompt=prompt)
    return "".join(decoder.push((token,)) for token in ids) + decoder.flush()


def _streams(tokenizer: Tokenizer) -> Iterator[tuple[str, object, object]]:
    for ids in _answers(tokenizer):
        theirs = tokenizer.reference.decode(ids, skip_special_tokens=True)
        yield str(ids[:4]), _streamed(tokenizer, ids), theirs


def _behind_prompts(tokenizer: Tokenizer) -> Iterator[tuple[str, object, object]]:
    """As vLLM has it: tokenizers' stream, which knows the prompt. Texts only: random ids end within characters."""
    prompt = tokenizer.reference.encode("Hello").ids
    for text in TEXTS:
        ids = tokenizer.reference.encode(text, add_special_tokens=False).ids
        stream = DecodeStream(ids=prompt, skip_special_tokens=True)
        theirs = "".join(stream.step(tokenizer.reference, token) or "" for token in ids)
        yield repr(text)[:30], _streamed(tokenizer, ids, prompt), theirs


def chats(name: str, tokenizer: Tokenizer, source: str, special: dict[str, str]) -> Iterator[Row]:
    """Against Hugging Face's `apply_chat_template(tokenize=True)`, and with control tokens in what users say."""
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer.reference, **special)
    template = ChatTemplate(source, special)

    def ids() -> Iterator[tuple[str, object, object]]:
        for shape, given in CONVERSATIONS_OF_TEXT.items():
            request = request_of(given)
            messages = template_messages(request.messages, template.form)
            wanted = theirs.apply_chat_template(
                messages, chat_template=source, tokenize=True, add_generation_prompt=True, return_dict=False
            )
            yield shape, _prompt(request, template, tokenizer), wanted

    yield _row(name, "chats: transformers", ids())

    def spelled() -> Iterator[tuple[str, object, object]]:
        for token in sorted(tokenizer.special)[:60]:
            text = tokenizer.reference.id_to_token(token) or ""
            counts = []
            for said in (f"a{text}b", "ab"):
                body = {"messages": [{"role": "user", "content": said}]}
                request = request_of(CONVERSATIONS_OF_TEXT["plain"]._replace(body=body))
                prompt = _prompt(request, template, tokenizer)
                counts.append(sum(one in tokenizer.special for one in prompt))
            yield text, counts[0], counts[1]

    yield _row(name, "chats: control tokens said", spelled())


def _prompt(request: GenerationRequest, template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    literal = LiteralText(tokenizer)
    text = render(request, template, literal, True)
    return list(asyncio.run(literal.encode(text, add_special_tokens=False)).tolist())


def mistral() -> Iterator[Row]:
    """Against mistral_common, with the vocabularies that come with it, as Hugging Face converts them."""
    made: list[tuple[str, Any, Callable[[], Any]]] = [
        (
            "tekken_240911",
            MistralTokenizer.from_file(str(MISTRAL_DATA / "tekken_240911.json")),
            lambda: convert_tekken_tokenizer(str(MISTRAL_DATA / "tekken_240911.json")),
        ),
        (
            "mistral v3 (SentencePiece)",
            MistralTokenizer.v3(),
            lambda: _converted(MISTRAL_DATA / "mistral_instruct_tokenizer_240323.model.v3"),
        ),
    ]
    for name, theirs, convert in made:
        inner: Any = theirs.instruct_tokenizer.tokenizer
        converted = convert().backend_tokenizer
        ours = Tokenizer(converted.to_str().encode())
        yield _row(
            name,
            "ids: mistral_common",
            (
                (repr(text)[:30], _encoded(ours, text), inner.encode(text, bos=False, eos=False))
                for text in TEXTS
            ),
        )
        yield from texts(name, ours)


def _converted(model: Path) -> Any:
    """SentencePiece's model as Hugging Face's AutoTokenizer reads it."""
    folder = Path(tempfile.mkdtemp())
    shutil.copy(model, folder / "tokenizer.model")
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **tokens}))
    return AutoTokenizer.from_pretrained(str(folder))


def _special(given: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = given.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def rows(tokenizers: Path | None, templates: Path | None) -> Iterator[Row]:
    """All comparisons, one by one."""
    small = start_model.ensure()
    smollm2 = Tokenizer((small / "tokenizer.json").read_bytes())
    given = json.loads((small / "tokenizer_config.json").read_text())
    path = small / "chat_template.jinja"
    source = path.read_text() if path.is_file() else given["chat_template"]
    yield from texts("smollm2", smollm2)
    yield from chats("smollm2", smollm2, source, _special(given))
    yield from mistral()
    for name in names_of(tokenizers) if tokenizers is not None else ():
        tokenizer, given = real(Path(tokenizers or ""), name), settings(Path(tokenizers or ""), name)
        yield from texts(name, tokenizer)
        source = given.get("chat_template") or ""
        if not source and templates is not None and name in TEMPLATE_OF:
            source = (templates / f"{TEMPLATE_OF[name]}.jinja").read_text()
        if source:
            yield from chats(name, tokenizer, source, _special(given))
        if name == "gptoss":
            yield from harmony(Path(tokenizers or ""))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizers", type=Path, help="a folder with NAME/tokenizer.json")
    parser.add_argument("--templates", type=Path, help="a folder of *.jinja files")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    for row in rows(given.tokenizers, given.templates):
        print(
            f"{row.vocabulary:<28}{row.compared:<28}{row.right:>5} of {row.cases:<5}{row.example}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
