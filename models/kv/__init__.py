"""The KV cache: slots and rows, prefill, prefill batching, bytes per position."""
