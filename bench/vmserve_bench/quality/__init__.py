"""``vmserve bench quality``: what quantization and number types cost in answers."""
