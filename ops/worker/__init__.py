"""The process of an engine: its plan, its checks, its workers."""
