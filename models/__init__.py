"""Text and image models behind one interface, which embeds prompts and runs forwards over a KV cache."""
