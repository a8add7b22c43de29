"""Where `make clients` installs the clients."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CLIENTS: Final = ROOT / ".clients"
NODE: Final = CLIENTS / "npm"
PROGRAMS: Final = Path(__file__).parent / "programs"
