"""Plans, runs, resumes, finalizes, estimates and audits jobs, and records process deaths in a crash ledger."""
