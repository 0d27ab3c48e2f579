"""Training runs: rows, workers, output folder."""
