"""Other implementations of `Group`, each made by a `connect` of its own."""
