"""Which of several engines gets a request: a policy over numbers."""
