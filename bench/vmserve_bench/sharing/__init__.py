"""``vmserve bench sharing``: what sharing blocks saves, and what a shared prefix is worth."""
