"""``vmserve batch``: a file of requests, answered by the server's application without a port."""
