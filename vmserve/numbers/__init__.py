"""Element types, sizes and arrays in host memory: what a number is."""
