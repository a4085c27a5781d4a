"""Tests of te_dist. They mirror the package; what several of them share is imported from `tests` or `te_dist.testing`."""
