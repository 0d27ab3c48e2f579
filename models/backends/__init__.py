"""Device-specific execution: the interface and its reference in plain torch."""
