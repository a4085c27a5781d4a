"""Where scales come from: agreement between ranks, and histories of past amaxes."""
