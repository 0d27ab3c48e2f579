"""Connects jobs to Ray, submits them, and handles draining nodes, signals and worker logs."""
