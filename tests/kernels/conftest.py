"""Kernels in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels`, in a process of its own.

A kernel decorated in one mode cannot run in the other, so without the variable nothing here is collected.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from helpers import interpreter

    interpreter.install()
else:
    collect_ignore_glob = ["test_*.py"]
