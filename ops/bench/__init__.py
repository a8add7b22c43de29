"""Performance claims as commands: each prints a rate or a time with its conditions."""
