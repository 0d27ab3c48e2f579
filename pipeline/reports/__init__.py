"""Summary, progress, preview and contact sheet."""
