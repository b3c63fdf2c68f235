"""DataFrames as data sets in the store: which columns, which rows, written by Spark, and known again by a later fit."""
