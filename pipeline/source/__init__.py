"""Reads a source: manifest, spans, ids, done bitmap, datasource."""
