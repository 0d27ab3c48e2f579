"""Reports about jobs: progress while they run, the closing summary, the report of a job, drift and contact sheet."""
