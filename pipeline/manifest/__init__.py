"""Freezes the listing of a source: manifest, spans, ids, done bitmap, shards, datasource."""
