"""Writes the rows of DataFrames to the store, and recognizes rows that were written before."""
