"""Commands that read what a fleet has recorded."""
