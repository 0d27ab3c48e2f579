"""Device-specific execution: the backend interface, a reference backend in plain torch, CPU and CUDA backends."""
