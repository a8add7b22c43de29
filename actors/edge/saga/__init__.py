"""The life of a request: it is placed, dispatched, followed, migrated and recorded."""
