"""How ranks that ask for operations in different orders come to carry them out in one: rounds of small messages."""
