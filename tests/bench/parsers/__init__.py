"""Output parsers against recorded outputs of real models: how many are parsed as they should be, and at what cost."""
