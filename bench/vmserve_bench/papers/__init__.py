"""``vmserve bench papers``: simulated (``figures``) and real (``real``, ``real_virtual``)."""
