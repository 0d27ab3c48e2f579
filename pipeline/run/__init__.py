"""Plans, runs, resumes, finalizes, estimates and checks jobs, and records process deaths in a crash ledger."""
