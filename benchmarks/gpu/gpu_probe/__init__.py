"""Parts of the GPU probe, one module for each section and for what the sections share."""
