"""Controllers: choose the draft depth of each step, fixed or by goodput from measured times and acceptance rates."""
