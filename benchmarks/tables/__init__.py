"""Renders committed results into the documents; reads JSON only, so nothing is measured or loaded here."""
