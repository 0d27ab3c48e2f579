"""Tests of pipeline.quality."""
