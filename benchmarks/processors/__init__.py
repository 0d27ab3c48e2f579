"""Measures where the target's processor runs."""
