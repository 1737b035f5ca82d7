"""``vmserve bench alloc``: what allocating KV memory costs, and how little of it is wasted.

One module per question, whose ``run`` measures. Nothing here needs a model: the C++ core and a page
driver are driven directly.
"""
