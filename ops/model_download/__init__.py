"""Models by name: from a hub, a bucket or a web server into a folder of this machine."""
