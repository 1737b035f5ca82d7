"""Request shapes with the lengths and arrivals of published traces, and conversations of text."""
