"""Model classes, and the table that finds them."""
