"""The life cycle of a worker: its model card, its incarnation under a lease, its health, the audit of commands."""
