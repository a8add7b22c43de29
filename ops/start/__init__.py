"""The processes of a fleet: how one starts, listens, reports and ends, and how a machine plans and supervises its own."""
