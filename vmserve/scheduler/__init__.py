"""Which sequences compute in the next step, and in which view: counts and pages, never a tensor."""
