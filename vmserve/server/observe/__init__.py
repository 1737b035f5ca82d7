"""What metrics and traces report."""
