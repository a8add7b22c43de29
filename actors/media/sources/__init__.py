"""Bytes of media: from the web, from data URLs, from listed folders. All of it is limited before it is decoded."""
