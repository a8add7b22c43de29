"""Settings: types, defaults, sources (file, environment, flags)."""
