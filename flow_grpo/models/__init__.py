"""One final adapter class per model family, over the family's real diffusers pipeline."""
