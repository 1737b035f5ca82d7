"""KV memory: one pool of pages, two views of them."""
