"""One request at the edge, from its first routing query to its last token, across migrations."""
