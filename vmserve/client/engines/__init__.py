"""Several engines of one model behind one client."""
