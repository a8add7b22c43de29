"""Files that workers generate for an edge, images and videos: requests for them, placed, followed and fetched."""
