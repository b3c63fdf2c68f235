"""Everything that shows people how a job runs: progress, history, report, status page. Decides nothing."""
