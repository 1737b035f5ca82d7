"""Shared by all benchmarks: rounds, statistics, measuring, tables, files."""
