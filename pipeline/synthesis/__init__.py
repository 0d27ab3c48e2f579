"""Plans synthesis jobs, prepares their prompts and encodes their images."""
