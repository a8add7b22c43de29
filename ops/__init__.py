"""Running Headwater: command line, configuration, supervision of processes, replay, benchmarks."""
