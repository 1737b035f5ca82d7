"""``vmserve bench ab``: the same requests through several engine options, compared in pairs."""
