"""The trial of methods (`method: auto`)."""
