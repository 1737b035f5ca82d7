"""How messages reach an engine."""
