"""What is run as `python -m jobs.X`: functions only; a `main(argv)` that returns the exit status."""
