"""`tilewave accuracy`: how far products are from the exact ones as K grows, mode by mode."""
