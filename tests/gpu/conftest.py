"""These tests run where CUDA is; elsewhere they are skipped as a whole."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "/gpu/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture
def unpoisoned(monkeypatch):
    """Poison is a fill, which is a launch that the product does not have."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, getattr(torch._C._VariableFunctions, name))
