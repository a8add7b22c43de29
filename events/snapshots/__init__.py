"""Snapshots of folded state: format, store, local cache, policy, retention, bookmarks."""
