"""What a trace or a recorded log would meet with other settings (`whatif`, `tune`), on other GPUs (`advise`), or at an endpoint (`replay --into`)."""
