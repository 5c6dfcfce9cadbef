"""Rewards, one file each; `base.py` is their contract, `client.py` calls them."""
