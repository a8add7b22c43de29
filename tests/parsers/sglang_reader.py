"""What SGLang's detectors make of texts: a program of the environment with SGLang. It reads and writes JSON files.

python -m tests.parsers.sglang_reader CASES RESULTS
"""

import json
import sys
from pathlib import Path
from typing import Any


def make(name: str, tools: list[dict[str, Any]]) -> Any:
    """A parser as SGLang's server makes it for a request."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return FunctionCallParser([Tool(**tool) for tool in tools], name)


def whole(name: str, case: dict[str, Any]) -> dict[str, Any]:
    text, calls = make(name, case["tools"]).parse_non_stream(case["text"])
    return {"text": text, "calls": [[call.name or "", call.parameters] for call in calls]}


def streamed(name: str, case: dict[str, Any]) -> dict[str, Any]:
    parser = make(name, case["tools"])
    texts: list[str] = []
    calls: dict[int, list[str]] = {}
    results = [parser.parse_stream_chunk(piece) for piece in case["pieces"]]
    results.append(parser.parse_stream_end())
    for text, found in results:
        texts.append(text or "")
        for call in found:
            begun = calls.setdefault(call.tool_index, ["", ""])
            begun[0] += call.name or ""
            begun[1] += call.parameters or ""
    return {"text": "".join(texts), "calls": [calls[index] for index in sorted(calls)]}


def main() -> None:
    """Read the cases, write the readings."""
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for case in cases:
        result = {}
        for way in (whole, streamed):
            try:
                result[way.__name__] = way(case["sglang"], case)
            except Exception as error:
                result[way.__name__] = {"error": f"{type(error).__name__}: {error}"[:200]}
        results.append(result)
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
