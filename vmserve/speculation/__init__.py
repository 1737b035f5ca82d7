"""Speculative decoding: drafts of what a sequence may say next, and how many of them pay."""
