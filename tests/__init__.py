"""Tests of te_dist. They mirror the package; what several share stands in `te_dist.testing`."""
