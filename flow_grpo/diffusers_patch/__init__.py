"""Names that people import from yifan123/flow_grpo, as thin functions over this core."""
