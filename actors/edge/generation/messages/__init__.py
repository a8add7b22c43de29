"""Messages of a conversation, and their media: as clients send them, decoded by the media intake, and as tokens of the prompt."""
