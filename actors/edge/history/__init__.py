"""Stored responses and conversations: what clients refer to by id instead of sending it again."""
