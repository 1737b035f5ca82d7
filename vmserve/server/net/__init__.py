"""Connections, and threads and processes for work on requests."""
