"""A request's life: placed, dispatched, followed, migrated and recorded."""
