"""A drafter–target pair and its parts, loaded and checked; slots per engine."""
