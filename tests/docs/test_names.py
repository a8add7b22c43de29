"""Every path, module, command, flag, variable, metric and name in code style on a page exists."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from headwater.ops.config.processes import all_settings
from tests.bench.zoo.options import ZooOptions
from tests.docs.pages import PAGES, ROOT, blocks, commands, prose

REFERENCE = ROOT / "docs" / "reference"
HAND_WRITTEN = [page for page in PAGES if page.parent != REFERENCE and page.name != "changelog.md"]
AREAS = ("actors", "deploy", "docs", "engines", "events", "examples", "ops", "router", "schemas", "tests")

FOREIGN_FLAGS = {
    # SGLang's diffusion server.
    "--num-gpus",
    "--ulysses-degree",
    "--model-id",
    "--backend",
    # vLLM's own
    "--no-enable-prefix-caching",
    "--enable-lora", "--generation-config", "--max-num-batched-tokens", "--max-num-seqs", "--override-generation-config",
    "--convert", "--download-dir", "--hf-token", "--load-format", "--media-io-kwargs", "--revision", "--tokenizer", "--mm-processor-kwargs", "--pipeline-parallel-size", "--runner", "--tensor-parallel-size",
    # SGLang's own
    "--constrained-json-disable-any-whitespace", "--disable-radix-cache", "--decode-log-interval", "--dp-size", "--enable-deterministic-inference",
    "--chunked-prefill-size", "--dllm-algorithm", "--enable-hierarchical-cache", "--enable-memory-saver", "--enable-priority-scheduling", "--enable-strict-thinking", "--grammar-backend", "--is-embedding",
    "--enable-adaptive-dispatch-to-encoder", "--encoder-only", "--language-model-only", "--language-only", "--limit-mm-data-per-request", "--mm-process-config", "--mem-fraction-static", "--skip-tokenizer-init",
    # Helm's
    "--values", "--wait",
    "--dtype", "--kv-cache-memory-bytes", "--kv-cache-dtype", "--max-running-requests",
    # aiperf, guidellm and vLLM's benchmark
    "--goodput", "--itl-ms", "--ttft-ms", "--use-server-token-count",
    # of other tools, and of modules outside the command line
    "--batch", "--signal", "--clients", "--system", "--home-dir", "--now", "--dist", "--hypothesis-profile", "--randomly-seed", "--migration-limit", "--help", "--version", "--ref", "--strict", "--burst", "--events", "--minutes", "--period", "--rate",
    "--rounds", "--write-docs",
}  # fmt: skip
FOREIGN_NAMES = {
    # NVIDIA Dynamo's settings, on the comparison page
    "overlap_score_credit", "prefill_load_scale", "router_predicted_ttl_secs",
    # Prometheus, vLLM, Kafka and other systems
    "file_sd_configs", "enable_cross_layers_blocks", "base_url", "publish_async", "AsyncLLM", "open_session",
    "time_to_first_token", "inter_token_latency", "inter_chunk_latency", "request_latency", "output_token_throughput", "request_throughput",
    "multimodal_embedding_handles", "multi_modal_embeddings", "mrope_position_ids_handle", "get_audio_feature",
}  # fmt: skip

_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_PATH = re.compile(rf"(?:{'|'.join(AREAS)})/[\w./-]*")
_MODULE = re.compile(r"python -m ((?:headwater|tests|docs)[\w.]*\w)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
_VARIABLE = re.compile(r"\bHEADWATER_[A-Z_]+\b")
_METRIC = re.compile(r"\bheadwater_[a-z_]+[a-z]\b")
_NAME = re.compile(r"[a-z]+(?:_[a-z0-9]+)+|[A-Z][a-z]+(?:[A-Z][a-z]+)+")
_COMMAND = re.compile(r"^headwater ([a-z][a-z-]*)((?: [^|\n]*)?)")


def on_every_page(check: Callable[[Path], None]) -> Callable[[], None]:
    """A check of one page as one test of all pages: a test for each of them would take longer than what it checks."""

    def test() -> None:
        for page in HAND_WRITTEN:
            try:
                check(page)
            except AssertionError as error:
                error.add_note(f"on {page.relative_to(ROOT)}")
                raise

    return test


def _spans(page: Path) -> Iterator[str]:
    yield from _SPAN.findall(prose(page))


@cache
def _source() -> frozenset[str]:
    """Every word of the source, and the names in settings that are tables, which are made of two."""
    words = {name for one in all_settings().values() for name in one.fields}
    for area in (*AREAS, ".github"):
        for path in (ROOT / area).rglob("*"):
            if path.suffix in (".py", ".toml", ".service", ".yaml", ".yml") and "docs/_build" not in str(
                path
            ):
                words |= set(re.findall(r"\w+", path.read_text()))
    return frozenset(words | set(re.findall(r"\w+", (ROOT / "pyproject.toml").read_text())))


@cache
def command_sections() -> dict[str, str]:
    """The reference's section of each command, with those of the commands below it."""
    sections = re.split(r"^## ", (REFERENCE / "cli.md").read_text(), flags=re.MULTILINE)[1:]
    found: dict[str, str] = {}
    for section in sections:
        name = section.split()[0]
        found[name] = found.get(name, "") + section
    # It takes the flags of the command whose settings it shows.
    found["config"] = "".join(sections)
    return found


@on_every_page
def test_paths_exist(page: Path) -> None:
    for span in _spans(page):
        for path in _PATH.findall(span) if _PATH.match(span) else []:
            assert (ROOT / path).exists() or "<" in span or "…" in span, f"`{span}`"


@on_every_page
def test_modules_exist(page: Path) -> None:
    for module in _MODULE.findall(page.read_text()):
        path = ROOT / module.removeprefix("headwater.").replace(".", "/")
        assert path.with_suffix(".py").is_file() or path.is_dir(), module


@on_every_page
def test_flags_and_variables_exist(page: Path) -> None:
    text = page.read_text()
    pages = (REFERENCE / "cli.md", REFERENCE / "settings.md", ROOT / "tests" / "bench" / "__main__.py")
    known = "".join(page.read_text() for page in pages)
    flags = set(_FLAG.findall(known)) | FOREIGN_FLAGS
    flags |= {f"--{field.replace('_', '-')}" for field in ZooOptions._fields}
    shown = {
        flag
        for block in blocks(page)
        if block.language in ("sh", "console")
        for flag in _FLAG.findall(block.text)
    }
    unknown = {f for span in _spans(page) for f in _FLAG.findall(span)} | {
        f for f in shown if f in _headwater_flags(page)
    }
    assert not unknown - flags
    assert not set(_VARIABLE.findall(text)) - set(_VARIABLE.findall(known))


def _shown_commands(page: Path) -> list[tuple[str, str]]:
    """(command, rest of the line) of each command of ours that a page shows."""
    lines = list(_spans(page))
    for block in blocks(page):
        if block.language == "console":
            lines += [command.line for command in commands(block)]
        elif block.language == "sh":
            lines += block.text.splitlines()
    return [found for line in lines for found in _COMMAND.findall(line)]


def _headwater_flags(page: Path) -> set[str]:
    return {
        flag
        for _, rest in _COMMAND.findall(page.read_text())
        for flag in _FLAG.findall(rest.split(" -- ")[0])
    }


@on_every_page
def test_commands_take_the_flags_shown(page: Path) -> None:
    for name, rest in _shown_commands(page):
        assert name in command_sections(), f"headwater {name}"
        for flag in _FLAG.findall(rest.split(" -- ")[0]):
            assert flag in command_sections()[name] or flag == "--help", f"headwater {name} {flag}"


@on_every_page
def test_metrics_exist(page: Path) -> None:
    known = set(_METRIC.findall((REFERENCE / "metrics.md").read_text()))
    # A histogram's series have the suffix of what they count.
    named = {name.removesuffix("_bucket") for name in _METRIC.findall(page.read_text())}
    assert not named - known


@on_every_page
def test_names_in_code_style_exist(page: Path) -> None:
    """Log events, fields, classes and functions: a renamed one is renamed here too."""
    named = {span for span in _spans(page) if _NAME.fullmatch(span)}
    assert not named - _source() - FOREIGN_NAMES
