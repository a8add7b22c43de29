"""Third-party packages: each is declared, and what an installation without extras has is enough for everything that needs none."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from typing import Any

from tests.tidy.source import ROOT, source_files

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

BROUGHT = {
    "google": "protobuf, which grpcio-health-checking is made with",
    "filelock": "huggingface-hub's own locks",
    "safetensors": "every engine's format of weights",
    "torch": "every engine's tensors",
}
"""Packages that a declared one brings by its nature."""

NKEYS = "nkeys"
"""What nats-py's extra of that name brings."""

NEED_EXTRAS = {
    "actors.media.av_decoder",
    "actors.media.document_decoder",
    "actors.media.embedding_decoder",
    "actors.media.image_decoder",
    "actors.picker.actor",
    "actors.picker.exchange",
    "actors.picker.messages",
    "engines.vllm.embedding_connector",
    "engines.vllm.worker_extension",
    "ops.start.model_hub",
    "ops.start.model_store",
}
"""Modules that are imported only where their extra is installed."""

WITHOUT_EXTRAS = """
import importlib, importlib.abc, json, sys

wanted, blocked = json.loads(sys.argv[1])

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocked())
failed = {}
for name in wanted:
    try:
        importlib.import_module(f"headwater.{name}")
    except ModuleNotFoundError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""


def distributions(requirements: list[str]) -> set[str]:
    """Names of requirements, as distributions have them."""
    names = (re.split(r"[^A-Za-z0-9._-]", one)[0] for one in requirements)
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def imported() -> dict[str, str]:
    """Third-party packages that the product imports, each with a file that does."""
    found = {}
    for path in source_files().values():
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in (one.partition(".")[0] for one in names):
                if name not in sys.stdlib_module_names and name != "headwater":
                    found[name] = str(path.relative_to(ROOT))
    return found


def test_every_package_that_is_imported_is_declared() -> None:
    extras = chain.from_iterable(PROJECT["optional-dependencies"].values())
    declared = distributions([*PROJECT["dependencies"], *extras])
    owners = packages_distributions()
    unknown = {
        name: path
        for name, path in imported().items()
        if name not in (*BROUGHT, NKEYS) and not distributions([*owners.get(name, ()), name]) & declared
    }
    assert not unknown


def test_what_needs_no_extra_is_imported_without_any() -> None:
    """A light module that begins to import a heavy one takes all that import it with it."""
    core = distributions([*PROJECT["dependencies"], NKEYS])
    owners = packages_distributions()
    blocked = [name for name in imported() if not distributions([*owners.get(name, ()), name]) & core]
    assert {"obstore", "grpc", "PIL", "vllm"} <= set(blocked)
    modules = [name for name in source_files() if not name.endswith(("__main__", "__init__"))]
    given = json.dumps([sorted(modules), blocked])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, given], capture_output=True, text=True, check=True
    )
    failed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert failed.keys() == NEED_EXTRAS, failed
