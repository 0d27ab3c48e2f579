"""How many drafts per step: fixed, or by goodput from measured times and acceptance rates."""
