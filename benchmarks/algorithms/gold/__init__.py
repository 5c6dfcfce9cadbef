"""Rewards that know the truth about signs: they judge training, and are never trained on.

With PYTHONPATH=benchmarks/algorithms: gold.sign_distance:SignDistance, gold.background:Background,
gold.second_ocr:SecondOcr. Weight 0 in reward_fn scores them at evaluations only.
"""
