"""Numbers as JSON writes them."""

import re
from typing import Final

JSON_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
"""Without the words that Python's decoder accepts too (NaN, Infinity)."""
