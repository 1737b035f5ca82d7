"""The engine in a process of its own, and what the server's process says to it."""
