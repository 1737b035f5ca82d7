"""The models of a server: which one a request gets, and which are loaded."""
