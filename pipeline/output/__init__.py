"""The writer, published files, inventory, checksums, provenance."""
