"""The house rules: what `tests/test_house_rules.py` checks, one function per rule."""
