"""Runs a pilot of a job for `--estimate`: the cost of the whole job, and whether speculation pays."""
