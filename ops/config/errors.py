"""What is wrong with a configuration."""


class ConfigError(ValueError):
    """A setting that cannot be used. The message names it, its source, and what to do."""
