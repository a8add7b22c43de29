"""SGLang's arguments and releases: how arguments are built and checked, and what a release supports."""
