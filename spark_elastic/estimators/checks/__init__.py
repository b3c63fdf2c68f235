"""What the user brings to a fit, and what is asked of it: each mistake is one sentence, said before any Spark job."""
