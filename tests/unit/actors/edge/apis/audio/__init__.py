"""OpenAI's API of transcripts."""
