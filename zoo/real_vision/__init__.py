"""Defines and trains the vision pair whose language model is SmolLM2-135M-Instruct, and builds its model folders."""
