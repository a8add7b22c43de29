"""The HTTP APIs: their requests and responses, and the translation to and from one internal request."""
