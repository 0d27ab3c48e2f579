"""Records the attention calls of a decoder, and derives the rules of its layers."""
