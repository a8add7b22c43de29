"""The documentation builds as a site, without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

STRICT = ("-W", "--keep-going", "-n", "-q")
PLAIN = ("-D", "html_theme=basic", "-D", "smartquotes=0")
"""Without the theme, whose templates take a third of the time, and typographical quotes."""

pytest.importorskip("sphinx", reason="the extra `docs` is not installed")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("builder", ["dummy", pytest.param("html", marks=pytest.mark.soak)])
def test_it_builds_without_a_warning(tmp_path: Path, builder: str) -> None:
    """As `make docs` does, but for the looks: every link and reference within it leads somewhere.

    All is read and resolved; writing pages, which takes as long again, only adds that code is coloured.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            *STRICT,
            *PLAIN,
            "-b",
            builder,
            "-d",
            tmp_path / "trees",
            ROOT / "docs",
            tmp_path / "made",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made" / "index.html").is_file() is (builder == "html")


def test_links_of_the_pages_outside_lead_somewhere() -> None:
    """README and the like are not part of the site."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|src=\"([^\"]+)\"", (ROOT / name).read_text()):
            link = target[0] or target[1]
            assert link.startswith("https://") or (ROOT / link).exists(), f"{name}: {link}"
