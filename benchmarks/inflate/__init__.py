"""Widens and deepens small trained models to the cost of large ones, with unchanged outputs."""
