"""The source as a whole: manifest, spans, ids, done bitmap, datasource."""
