"""`headwater bench`: measurements of a server under load (`bench serve`), and of this machine.

These are performance claims as commands: each prints a rate or a time with its conditions.
"""
