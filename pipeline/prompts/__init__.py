"""Templates, conversations and options per row."""
