"""Code shared by all benchmarks: rounds, verdicts on outputs, claims, result files, tables and plots."""
