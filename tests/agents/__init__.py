"""Coding agents as people install them, with a task of ten turns, against a fleet whose engine follows a script."""
