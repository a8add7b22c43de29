"""Comparisons with peers and campaigns on GPUs, which need a checkout: `python -m tests.bench`, and the modules of `gpu`, `images` and `live`."""
