"""Job files: the schema that every YAML in this folder is checked against."""
