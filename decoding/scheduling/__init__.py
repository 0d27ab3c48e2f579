"""Requests to slots: admission, prompt prefetch, drafter prefill, steps in flight."""
