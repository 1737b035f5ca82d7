"""What every benchmark stands on: rounds, statistics, measuring, tables, files, pages."""
