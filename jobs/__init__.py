"""Provides the commands `draftfleet NAME` and `python -m jobs.NAME`, each a module with a `main(argv)` that returns the
exit status and a `parser()`."""

import draftfleet  # noqa: F401  # in a checkout, this refuses foreign packages with the names of ours
