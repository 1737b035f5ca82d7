"""Steps: what runs next, what it gives, and when it ends."""
