"""Over TCP, encrypted."""
