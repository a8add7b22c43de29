"""Items: what a conversation of the Responses API consists of. Pure."""
