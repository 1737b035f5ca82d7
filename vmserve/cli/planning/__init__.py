"""``vmserve plan``: what fits, without an engine."""
