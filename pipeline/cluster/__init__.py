"""The Ray session, job submission, code archive, drain, signals, worker logs."""
