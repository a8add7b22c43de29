"""The order in which an engine that generates one file at a time takes its requests."""
