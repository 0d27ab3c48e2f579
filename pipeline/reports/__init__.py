"""Reports about jobs: progress while they run, the closing summary, preview page and contact sheet."""
