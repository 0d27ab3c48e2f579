"""A reader that ends at its second file, for tests of the program around it."""

from __future__ import annotations

import os
import sys

first = int(sys.argv[1])
print(f'{{"begun": {first}}}', flush=True)
print(f'{{"seed": {first}, "name": "jpeg", "codes": ["read"], "faults": []}}', flush=True)
print(f'{{"begun": {first + 1}}}', flush=True)
os._exit(11)
