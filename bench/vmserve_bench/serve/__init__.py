"""``vmserve bench serve``: the load of ``bench ab``, over HTTP, to any OpenAI-compatible server."""
