"""The way from a conversation to tokens: messages, templates, media, speech and guides."""
