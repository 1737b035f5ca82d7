"""What measures, imitates or compares vmserve."""
