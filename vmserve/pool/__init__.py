"""Divide the memory of one pool among the KV caches of several models."""
