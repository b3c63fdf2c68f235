"""What `fit` does: rows in the store, the run that they belong to, workers that train, the model that comes back."""
