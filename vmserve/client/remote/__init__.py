"""Engines on other machines: the messages of :mod:`vmserve.client.messages` over TCP."""
