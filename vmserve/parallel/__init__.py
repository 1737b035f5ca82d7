"""Several processes that compute one model."""
