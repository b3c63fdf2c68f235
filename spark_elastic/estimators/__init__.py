"""Estimators of Spark ML that train elastically, and the models that they fit."""
