"""Clients of an engine: what users of the library call, and the server."""
