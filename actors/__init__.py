"""Where Ray meets torch: the pair that an actor loads, and the actor that decodes tables of rows.

Importing this package imports neither torch nor Ray and initialises no device.
"""
