"""Small trained models widened and deepened to the cost of large ones, with unchanged outputs."""
