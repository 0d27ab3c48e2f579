"""The package `draftfleet` of a checkout: `draftfleet.decoding` and the others are the top-level packages themselves.

A wheel has another `__init__.py`, and the packages as real subfolders; `wheel_layout.py` has the list.
"""

from draftfleet.checkout import install

install()
