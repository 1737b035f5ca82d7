"""What metrics and traces tell."""
