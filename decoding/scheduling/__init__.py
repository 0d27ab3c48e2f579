"""Assigns requests to slots: queue, admission, prompt prefetch, drafter prefill and steps in flight."""
