"""Public fakes and fault plans: a clock moved by hand, a simulated cluster, programs and launchers without Spark."""
