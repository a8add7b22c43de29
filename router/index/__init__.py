"""The prefix index: block hashes to workers, longest-prefix match, packing."""
