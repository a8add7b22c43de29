"""Every message of the system, by what it is about."""
