"""KV cache management: slots and rows, prefill, prefill batching, bytes per position."""
