"""`headwater bench`: measurements of a server under load (`bench serve`), and of this machine."""
