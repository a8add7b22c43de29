"""The `headwater` command."""

import sys

from headwater.ops.commands.application import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
