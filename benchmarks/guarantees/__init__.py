"""Measures how often the guarantees of audits, verifications and estimates hold."""
