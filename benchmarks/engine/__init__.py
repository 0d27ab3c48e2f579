"""Benchmarks this engine alone: speeds at every batch size, and the time of each phase of a step."""
