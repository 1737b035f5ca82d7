"""One module per engine, each with ``create(job)``; imported under that engine's interpreter."""
