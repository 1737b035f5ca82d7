"""What the engine counts, draws and writes down of itself."""
