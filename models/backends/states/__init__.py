"""Recurrent layers: states per row, and the rules by which stock layers of transformers read and write them."""
