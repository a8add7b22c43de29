"""The actors: the runtime that they share, and a file or folder for each."""
