"""Files that two values pass, by running them: `python -m tests.tidy.trace_files [--ref REV]`.

A chat prompt from the HTTP bytes at the edge to the route query, and a KV event from the engine to the router's
index. `tests.tidy.trace_harness` says how they are followed; with `--ref` it follows them in an older commit.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.tidy.source import ROOT, tree_of

TITLES = {
    "request": "a chat request: files that run for it, from HTTP bytes to the route query",
    "prompt": "its prompt: files that it passes, as bytes, text, tokens or block hashes",
    "kv-event": "a KV event: from the simulated engine to the router's index",
    "vllm-event": "a KV event: from vLLM's ZMQ socket to the engine port",
}


def trace(root: Path = ROOT) -> dict[str, dict[str, str]]:
    """By trace: each file touched, in order, with the function that touched it first."""
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("trace_harness.py"))],
        env={**os.environ, "PYTHONPATH": str(root / "src"), "NUMBA_DISABLE_JIT": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise RuntimeError(answer.stderr)
    found: dict[str, dict[str, str]] = json.loads(answer.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="files that a prompt and a KV event pass")
    parser.add_argument("--ref", help="a commit to trace instead of the working tree")
    arguments = parser.parse_args()
    with tree_of(arguments.ref) as root:
        found = trace(root)
    for name, files in found.items():
        print(f"{TITLES[name]}: {len(files)} files")
        for number, (file, function) in enumerate(files.items(), 1):
            print(f"  {number:2}  {file:45} {function}")
        print()


if __name__ == "__main__":
    main()
