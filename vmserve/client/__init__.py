"""What users of the library call."""
