"""Roll-outs: requests move from one revision of workers, or one routing policy, to another, step by step, judged by the log."""
