"""Ray actors that load a target and its drafter and decode tables of rows.

Importing this package imports neither torch nor Ray and initialises no device.
"""
