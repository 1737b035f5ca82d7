"""The engine: requests in, steps, updates out."""
