"""A job: plan, Ray Data graph, execution, estimate, resume, finalize, audit, crash ledger."""
