"""One module per engine, each with a class ``Engine``; imported under that engine's interpreter."""
