"""The debugger of a fleet: its logs followed, compared, searched and exported."""
