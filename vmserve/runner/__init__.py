"""A step on a device: the batch, the model's call, graphs, prices measured at start."""
