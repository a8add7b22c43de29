"""A small Internet for tests of the media intake: a TLS server on loopback, names with public addresses, and files."""
