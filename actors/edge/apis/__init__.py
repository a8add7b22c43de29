"""The HTTP APIs: what their requests and responses look like, and their translation to and from one internal request."""
